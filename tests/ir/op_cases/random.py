"""Cases of random numbers and their keys."""

from __future__ import annotations

from moaic.ir.graph import Op, Value
from moaic.ir.types import TensorType
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case, operands_like

cases = Cases()


@cases("moai.fold_key")
def fold_key(d: Drawn, name: str) -> Case:
    return case(name, d.ints(2, low=0, high=2**31), instance=d.number(0, 9))


@cases("moai.rand")
def rand(d: Drawn, name: str) -> Case:
    kind = TensorType(d.pick("f32", "f64"), d.shape())
    key = d.ints(2, low=0, high=2**31)
    return Case(Op(name, operands_like([key]), (Value(kind),)), (key,))
