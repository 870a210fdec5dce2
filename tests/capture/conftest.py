"""The compiler of a test, which has compiled nothing before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.capture.compiler import Compiler


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield Compiler()
    torch.compiler.reset()
