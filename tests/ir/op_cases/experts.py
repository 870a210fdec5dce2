"""Cases of products of rows with the matrices of experts."""

from __future__ import annotations

from torch import Tensor

from moaic.ir.graph import Op, Value
from moaic.ir.types import TensorType
from moaic.runtime.dtypes import DTYPE_NAMES
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case, operands_like

cases = Cases()


def grouped(d: Drawn) -> tuple[int, int, int, int, Tensor]:
    """Blocks (none if zero), matrices, rows, an inner size, and the matrix of each row, which may be none."""
    blocks, rows, inner = d.pick(0, 1, 2, 4), d.size(), d.pick(1, 2, 3)
    count = max(1, blocks) * d.pick(1, 2, 3)
    return blocks, count, rows, inner, d.ints(rows, low=-1, high=count)


@cases("moai.grouped_mm")
def grouped_mm(d: Drawn, name: str) -> Case:
    blocks, count, rows, inner, ids = grouped(d)
    x = d.real(*(() if not blocks else (d.pick(1, blocks),)), rows, inner)
    return blocked(name, [x, d.real(count, d.size(), inner), ids], blocks)


@cases("moai.grouped_outer")
def grouped_outer(d: Drawn, name: str) -> Case:
    blocks, count, rows, inner, ids = grouped(d)
    shared = d.pick(0, 1)
    one, other = ((() if not blocks else (blocks if i == shared else d.pick(1, blocks),)) for i in range(2))
    return case(name, d.real(*one, rows, inner), d.real(*other, rows, d.size()), ids, count=count)


def blocked(name: str, tensors: list[Tensor], blocks: int) -> Case:
    """How many blocks a product has, its result says."""
    x, weight, _ = tensors
    shape = (*((blocks,) if blocks else ()), x.shape[-2], weight.shape[1])
    result = Value(TensorType(DTYPE_NAMES[x.dtype], shape))
    return Case(Op(name, operands_like(tensors), (result,)), tuple(tensors))
