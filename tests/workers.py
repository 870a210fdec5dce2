"""Real workers, two of them, for the folders whose conftest names this."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from moaic.device.registration import register

os.environ.setdefault("MOAI_FLAVOR", "2")
os.environ.setdefault("MOAI_LOG", "warning")
register()


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """What other modules compiled: torch counts how often one forward is compiled, and gives up after eight."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
