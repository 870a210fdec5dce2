"""The mode, enabled for one test, on workers that all tests of this process share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from moaic.device.registration import register
from moaic.option import disable_advanced_parallelization, enable_advanced_parallelization

os.environ.setdefault("MOAI_FLAVOR", "2")
register()


@pytest.fixture
def mode() -> Iterator[None]:
    torch.manual_seed(0)
    enable_advanced_parallelization(compile=False)
    yield
    disable_advanced_parallelization()
