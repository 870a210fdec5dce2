"""Writes into memory that the op also reads: refused where PyTorch refuses them, else with PyTorch's result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("accelerator")

Write = Callable[[Tensor], object]

REFUSED: dict[str, tuple[Write, str]] = {
    "one element as three, copied": (lambda x: x[:1].expand(3).copy_(torch.ones(3)), "more than one element"),
    "one element as three, computed": (lambda x: x[:1].expand(3).add_(1), "more than one element"),
    "an element further, copied": (lambda x: x[1:].copy_(x[:-1]), "some elements of the input tensor"),
    "an element further, computed": (lambda x: x[1:].add_(x[:-1]), "some elements of the input tensor"),
    "into an order of its own": (lambda x: x.view(2, 2).copy_(x.view(2, 2).t()), "some elements of the input tensor"),
}

DONE: dict[str, Write] = {
    "beside": lambda x: x[:2].add_(x[2:]),
    "between, copied": lambda x: x[::2].copy_(x[1::2]),
    "between, computed": lambda x: x[::2].add_(x[1::2]),
    "nothing": lambda x: x[1:1].copy_(x[:0]),
    "itself": lambda x: x.add_(x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_overlaps_in_part_is_refused(name: str) -> None:
    write, words = REFUSED[name]
    for device in ("cpu", "moai"):
        x = torch.arange(4.0, device=device)
        with pytest.raises(RuntimeError, match=words):
            write(x)
        assert x.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", DONE)
def test_what_lies_apart_is_written(name: str) -> None:
    ours, theirs = torch.arange(4.0, device="moai"), torch.arange(4.0)
    for x in (ours, theirs):
        DONE[name](x)
    assert ours.tolist() == theirs.tolist()
