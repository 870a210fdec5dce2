"""The hash of random numbers as an op of PyTorch is that of `runtime/rng.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moaic.runtime.codegen.lower_random import PART
from moaic.runtime.rng import WORD, mix


def words(*shape: int) -> Tensor:
    return torch.randint(0, WORD + 1, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("given", [words(), words(PART), words(3, PART + 7), words(PART, 3).t(), words(0)])
def test_parts_are_hashed_as_the_whole(given: Tensor) -> None:
    before = given.clone()
    assert torch.equal(torch.ops.moai.mix.default(given), mix(given))
    assert torch.equal(given, before)
