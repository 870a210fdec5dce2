"""Eager reductions of sharded tensors compared with the host, on four workers that hold parts, replicas or nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.protocol.aten_schema import signature
from tests.runtime.controller.test_eager_placement import ATEN

PROGRAM = """// moai 1
mesh [{mesh}]
func @main(%x: {type}) -> ({type}) {{
  return %x
}}
"""

PLACES = {
    "rows of dp": "[8{dp}, 4]",
    "rows of dp, columns of tp": "[8{dp}, 4{tp}]",
    "columns of tp": "[8, 4{tp}]",
    "rows of both": "[8{dp, tp}, 4]",
    "everywhere": "[8, 4]",
    "uneven rows of dp": "[7{dp:4}, 4]",
    "uneven rows of dp, uneven columns of tp": "[7{dp:4}, 3{tp:2}]",
    "uneven columns of tp": "[8, 3{tp:2}]",
    "uneven rows, the last rank without any": "[5{dp:2}, 4]",
}

MESHES = {"uneven rows, the last rank without any": "dp=4"}
"""Of the places of another mesh than two by two."""


def fitting(value: Tensor, place: str) -> Tensor:
    """The value of 8 x 4 elements, or as much of it as a place takes."""
    rows, columns = re.findall(r"(\d+)(?:{[^}]*})?[,\]]", PLACES[place])
    return value[: int(rows), : int(columns)].contiguous()


Options = Mapping[str, Any]

REDUCTIONS: Sequence[tuple[str, Sequence[Any], Options]] = (
    ("aten.sum", (), {}),
    ("aten.sum", (), {"dtype": torch.float64}),
    ("aten.sum.dim_IntList", ([0],), {}),
    ("aten.sum.dim_IntList", ([-1], True), {}),
    ("aten.sum.dim_IntList", ([0, 1],), {}),
    ("aten.mean", (), {}),
    ("aten.mean.dim", ([0], True), {}),
    ("aten.amax", ([1],), {}),
    ("aten.amin", (), {}),
    ("aten.max", (), {}),
    ("aten.any", (), {}),
    ("aten.all.dim", (0,), {}),
    ("aten.count_nonzero", (), {}),
    ("aten.linalg_vector_norm", (), {}),
    ("aten.linalg_vector_norm", (1,), {}),
    ("aten.linalg_vector_norm", (float("inf"), [0]), {}),
    ("aten.linalg_vector_norm", (3, [1], True), {}),
    ("aten.linalg_vector_norm", (0,), {}),
    ("aten.linalg_vector_norm", (float("-inf"),), {}),
)


class Four:
    """Four workers, and tensors at rest on them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def up(self, tensor: Tensor, place: str) -> Buffer:
        name = DTYPE_NAMES[tensor.dtype]
        program = self.accelerator.load(
            PROGRAM.format(mesh=MESHES.get(place, "dp=2, tp=2"), type=name + PLACES[place]), compiled=False
        )
        buffer = self.accelerator.buffer(name, tuple(tensor.shape))
        self.accelerator.upload(buffer, tensor - 1)
        self.accelerator.run(program, [buffer], [None])
        self.accelerator.launch("aten.add_.Scalar", (whole(buffer), 1), {}, ())  # padding is no longer zero
        return buffer

    def reduced(self, op: str, x: Any, expected: Sequence[Tensor], args: Sequence[Any], options: Options) -> list[Any]:
        made = [self.accelerator.buffer(DTYPE_NAMES[each.dtype], tuple(each.shape)) for each in expected]
        self.accelerator.launch(op, (x, *args), options, made)
        return made


@pytest.fixture(scope="module")
def workers(four: Accelerator) -> Four:
    return Four(four)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reductions(workers: Four, place: str, dtype: torch.dtype) -> None:
    """Whole numbers: every sum is exact, so the results must be equal."""
    torch.manual_seed(0)
    value = fitting(torch.randint(-9, 9, (8, 4)), place).to(dtype)
    buffer = workers.up(value, place)
    for op, args, options in REDUCTIONS:
        expected: Any = signature(op).overload(value, *args, **options)
        (found,) = workers.reduced(op, whole(buffer), [expected], args, options)
        result = workers.accelerator.download(whole(found))
        if "norm" in op:
            torch.testing.assert_close(result, expected)
        else:
            assert result.dtype == expected.dtype
            assert torch.equal(result, expected), op


def test_what_is_not_a_number_is_not_lost(workers: Four) -> None:
    for place in PLACES:
        value = fitting(torch.zeros(8, 4), place)
        value[-1, -1] = float("nan")
        buffer = workers.up(value, place)
        for op, args in (("aten.amax", ()), ("aten.linalg_vector_norm", (float("inf"),)), ("aten.sum", ())):
            (found,) = workers.reduced(op, whole(buffer), [torch.zeros(())], args, {})
            assert workers.accelerator.download(whole(found)).isnan()


def test_a_reduction_of_other_dims_stays_split(workers: Four) -> None:
    buffer = workers.up(torch.ones(8, 4), "rows of dp, columns of tp")
    (found,) = workers.reduced("aten.sum.dim_IntList", whole(buffer), [torch.zeros(8)], ([1],), {})
    assert [(split.axis, split.dim) for split in found.place.layout.splits] == [("dp", 0)]


@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_a_list_takes_one_exchange(workers: Four, order: float) -> None:
    """Parts, copies and what lies nowhere yet, of several types."""
    types = [torch.bfloat16 if i % 2 else torch.float32 for i, _ in enumerate(PLACES)]
    values = [
        fitting(torch.randint(-9, 9, (8, 4)), place).to(dtype) for place, dtype in zip(PLACES, types, strict=True)
    ]
    buffers = [workers.up(value, place) for value, place in zip(values, PLACES, strict=True)]
    late = workers.accelerator.buffer("f32", (3,))
    workers.accelerator.fill(late, 2.0)
    given = [whole(buffer) for buffer in (*buffers, late)]
    expected = ATEN._foreach_norm([*values, torch.full((3,), 2.0)], order)
    found = workers.reduced("aten._foreach_norm.Scalar", given, expected, (order,), {})
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(workers.accelerator.download(whole(one)), other)
    before = workers.accelerator.stats().commands
    again = workers.reduced("aten._foreach_norm.Scalar", given, expected, (order,), {})
    assert workers.accelerator.stats().commands - before <= 4, "one op, and requests"
    assert all(buffer.place.is_whole for buffer in again)
