"""Values that one op moves together arrive as they do alone: small and large ones, of several axes and types."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm.bundle import SMALL
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.dtypes import DTYPES

LARGE = SMALL // 2

VALUES = (
    ("f32", (8, 6), "8{a}, 6"),
    ("f32", (4, 6), "4, 6{b}"),
    ("f32", (LARGE, 2), f"{LARGE}{{a}}, 2"),
    ("f64", (8,), "8{a}"),
    ("f32", (3, 8), "3, 8{a}"),
    ("f32", (8, 8), "8{a}, 8{b}"),
    ("f32", (16,), "16{a:4}"),
    ("f64", (4, 4), "4{a}, 4"),
    ("f32", (5, 3), "5, 3"),
    ("f32", (6,), "6{b}"),
    ("f32", (7, 3), "7{a:4}, 3"),
    ("f32", (3, 7), "3{b:2}, 7{a:4}"),
    ("f32", (3, LARGE - 1), f"3, {LARGE - 1}{{a:{LARGE // 2}}}"),
)
"""Type, shape, and the text of the sharded type."""


def program() -> str:
    """Each value doubled on the ranks that it is sharded over."""
    given = ", ".join(f"%x{n}: {dtype}[{type_}]" for n, (dtype, _, type_) in enumerate(VALUES))
    types = ", ".join(f"{dtype}[{type_}]" for dtype, _, type_ in VALUES)
    ops = [f"  %y{n} = aten.add.Tensor %x{n}, %x{n} : {dtype}[{type_}]" for n, (dtype, _, type_) in enumerate(VALUES)]
    results = ", ".join(f"%y{n}" for n in range(len(VALUES)))
    names = ", ".join(f"%x{n}" for n in range(len(VALUES)))
    return "\n".join(
        [
            "// moai 1",
            "mesh [a=2, b=2]",
            f"func @twice({given}) -> ({types}) {{",
            *ops,
            f"  return {results}",
            "}",
            f"func @main({given}) -> ({types}) {{",
            f"  {results} = call @twice {names} : {types}",
            f"  return {results}",
            "}",
            "",
        ]
    )


@pytest.fixture
def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=DTYPES[dtype]) for dtype, shape, _ in VALUES]


@pytest.fixture
def sharded(four: Accelerator, tensors: list[Tensor]) -> list[Buffer]:
    given = [four.buffer(dtype, shape) for dtype, shape, _ in VALUES]
    made = [four.buffer(dtype, shape) for dtype, shape, _ in VALUES]
    for buffer, tensor in zip(given, tensors, strict=True):
        four.upload(buffer, tensor)
    four.run(four.load(program(), compiled=False), given, made)
    return made


@pytest.mark.parametrize("rests", [True, False])
def test_values_that_are_gathered_together(
    four: Accelerator, tensors: list[Tensor], sharded: list[Buffer], rests: bool
) -> None:
    """Parameters, which rest whole, are cut and gathered; what rests nowhere stays sharded."""
    targets = [four.buffer(dtype, shape) for dtype, shape, _ in VALUES]
    for buffer in targets:
        four.upload(buffer, torch.ones(buffer.shape))
        four.launch("aten.add_.Scalar", (whole(buffer), 1), {}, ())  # every worker holds it
        buffer.rests = rests
    before = four.stats().commands
    for _ in range(2):
        four.launch("aten._foreach_add_.List", ([whole(b) for b in targets], [whole(b) for b in sharded]), {}, ())
    sent = four.stats().commands - before
    for buffer, tensor in zip(targets, tensors, strict=True):
        assert torch.equal(four.download(whole(buffer)), 2 + 2 * tensor + 2 * tensor)
        assert buffer.place is not None
        assert buffer.place.is_uncut is (rests or buffer.shape == (5, 3))
    if rests:
        assert sent < 2 * len(VALUES) + 10, "each way of each value is defined once"
