"""Cases of concatenation, padding, reversal and writes into a slice."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Attr, Op, Value
from moaic.ir.op_names import REPEAT_LAST
from moaic.ir.types import TensorType
from tests.ir.op_cases.drawing import Case, Cases, Drawn, case, operands_like
from tests.ir.op_cases.views import lengths

cases = Cases()


@cases("cat")
def cat(d: Drawn, name: str) -> Case:
    shape = list(d.shape(1))
    dim = d.dim(len(shape))
    parts: list[Tensor | None] = []
    for size in lengths(d):
        shape[dim] = size
        parts.append(d.real(*shape))
    if d.pick(False, False, False, True):
        parts.insert(d.number(0, len(parts)), d.real(0))
    return case(name, parts, dim=dim)


@cases("slice_scatter")
def slice_scatter(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dim = d.dim(len(shape))
    start = d.number(0, shape[dim] - 1)
    end = d.number(start + 1, shape[dim])
    step: dict[str, Attr] = {"step": 2} if d.pick(False, False, True) else {}
    whole = d.real(*shape)
    part = torch.ops.aten.slice.Tensor(whole, dim, start, end, step.get("step", 1))
    return case(name, whole, d.real(*part.shape), dim=dim, start=start, end=end, **step)


@cases(REPEAT_LAST)
def repeat_last(d: Drawn, name: str) -> Case:
    shape = list(d.shape(1))
    dim = d.dim(len(shape))
    given = d.real(*shape)
    shape[dim % len(shape)] += d.number(0, 3)
    return Case(Op(name, operands_like([given]), (Value(TensorType("f64", tuple(shape))),), {"dim": dim}), (given,))


@cases("constant_pad_nd")
def pad(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    pads: list[Attr] = []
    for at in range(d.number(1, len(shape))):
        size = shape[len(shape) - 1 - at]
        pads += d.pick((0, 0), (1, 0), (0, 2), (2, 1), (0, -1 if size > 1 else 0))
    value: dict[str, Attr] = {"value": 1.5} if d.pick(False, True) else {}
    return case(name, d.real(*shape), pad=tuple(pads), **value)


@cases("flip")
def flip(d: Drawn, name: str) -> Case:
    shape = d.shape(1)
    dims = d.draw(st.lists(st.integers(0, len(shape) - 1), max_size=2, unique=True))
    return case(name, d.real(*shape), dims=tuple(at - len(shape) if d.pick(False, True) else at for at in dims))
