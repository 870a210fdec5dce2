"""Rewrites of ops that make or combine numbers: constants, sums, ranges, scalars in place of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moaic.capture.fx.attributes import from_front
from moaic.capture.fx.op_call import OpCall, Rewrite, cast_to_result, each_of, viewed
from moaic.ir.graph import Attr, Value
from moaic.ir.op_names import SCALED_MM
from moaic.ir.ratios import Ratio
from moaic.ir.sizes import Size
from moaic.ir.types import FLOATING, TensorType


def _filled(value: Attr) -> Rewrite:
    """`aten.full` with the call's own `fill_value`, or with `value`.

    An uninitialised tensor is filled with 0, so that no result depends on the memory of a worker.
    """

    def fill(call: OpCall) -> Value:
        number = _number(call.attrs.get("fill_value", value), call.type)
        return call.emit("aten.full", size=call.type.shape, fill_value=number, dtype=call.type.dtype)

    return fill


def _scalar(call: OpCall) -> Value:
    return call.emit("aten.full", size=(), fill_value=_number(call.attrs["s"], call.type), dtype=call.type.dtype)


def _number(value: Attr, type_: TensorType) -> Attr:
    """`value` as the Python type that prints as an element of the tensor: 0.0, not False, for floats."""
    assert isinstance(value, int | float)
    if isinstance(value, Size | Ratio):
        return value
    return bool(value) if type_.dtype == "bool" else float(value) if type_.dtype in FLOATING else value


def _sum(call: OpCall) -> Value:
    rank = len(call.x.type.shape)
    dims = call.attrs.get("dim")
    every = tuple(range(rank))
    attrs = {name: value for name, value in call.attrs.items() if name != "dim"}
    if rank == 0:
        return cast_to_result(call)
    reduced = from_front(dims, rank) if dims else every
    return call.emit_as("aten.sum.dim_IntList", [call.x], {"dim": reduced, **attrs})


def _iota(call: OpCall) -> Value:
    start, step, length = (call.attrs.get(name, unset) for name, unset in (("start", 0), ("step", 1), ("length", 0)))
    assert isinstance(start, int)
    assert isinstance(step, int)
    assert isinstance(length, int)
    return _range(call, start, start + step * length, step)


def _arange(call: OpCall) -> Value:
    return _range(call, call.attrs.get("start", 0), call.attrs["end"], call.attrs.get("step", 1))


def _range(call: OpCall, start: Attr, end: Attr, step: Attr) -> Value:
    attrs: dict[str, Attr] = {"start": start, "end": end, **({"step": step} if step != 1 else {})}
    return call.emit_as("aten.arange.start_step", [], {**attrs, "dtype": call.type.dtype})


def _renamed(name: str) -> Rewrite:
    """The op under the name of another that computes the same."""
    return lambda call: call.emit_as(name, call.operands, call.attrs)


def _with_number(name: str) -> Rewrite:
    """`mul.Scalar` and the like as the tensor overload, with a number in place of the second tensor."""

    def emit(call: OpCall) -> Value:
        other: Any = call.attrs["other"]
        if not isinstance(other, complex):
            return call.emit_as(name, [*call.operands, None], call.attrs)
        rest = {key: value for key, value in call.attrs.items() if key != "other"}
        return call.emit_as(name, [*call.operands, call.builder.complex_number(other, call.type.dtype)], rest)

    return emit


def _scaled_mm(call: OpCall) -> Value:
    """`SCALED_MM` with scales as matrices, per tensor (1, 1) or per row (n, 1) and column (1, m).

    Scales of blocks and biases have no rule: the op stays `aten._scaled_mm`, which is replicated.
    """
    left, right, *scales = (operand for operand in call.operands if isinstance(operand, Value))
    wanted = [(left.type.shape[0], 1), (1, right.type.shape[1])]
    shapes = [(1, 1) if scale.type.elements() == 1 else scale.type.shape for scale in scales]
    if len(shapes) != 2 or any(shape not in ((1, 1), full) for shape, full in zip(shapes, wanted, strict=True)):
        return call.emit_as("aten._scaled_mm", call.operands, call.attrs)
    matrices = [viewed(call, scale, shape) for scale, shape in zip(scales, shapes, strict=True)]
    fast = {"use_fast_accum": True} if call.attrs.get("use_fast_accum") else {}
    return call.emit_as(SCALED_MM, [left, right, *matrices], {"dtype": call.type.dtype, **fast})


def _avg_pool2d_backward(call: OpCall) -> Value:
    """The op with two numbers per attribute, which Inductor requires, where the call gives one for both dims."""
    pairs = {name: given * 2 for name, given in call.attrs.items() if isinstance(given, tuple) and len(given) == 1}
    return call.emit_as(call.name, call.operands, {**call.attrs, **pairs})


VALUE_REWRITES: Final[Mapping[str, Rewrite]] = {
    **each_of("aten.full aten.full_like aten.new_full", _filled(0)),
    **each_of("aten.zeros aten.zeros_like aten.new_zeros", _filled(0)),
    **each_of("aten.ones aten.ones_like aten.new_ones", _filled(1)),
    **each_of(
        """aten.empty.memory_format aten.empty_like aten.new_empty aten.empty_strided aten.empty_permuted
        aten.new_empty_strided prims.empty_strided""",
        _filled(0),
    ),
    "aten.scalar_tensor": _scalar,
    **each_of("aten.sum aten.sum.dim_IntList", _sum),
    "prims.iota": _iota,
    **each_of("aten.arange aten.arange.start aten.arange.start_step", _arange),
    **{f"aten.{name}.Scalar": _with_number(f"aten.{name}.Tensor") for name in ("add", "sub", "mul", "div")},
    # A lazy conjugation is a bit of a tensor in PyTorch; a value of the IR has no such bit, so it is computed.
    **each_of("aten._conj aten._conj_physical", _renamed("aten.conj_physical")),
    "aten._neg_view": _renamed("aten.neg"),
    # PyTorch spells quotients of open sizes so.
    "aten.true_divide.Tensor": _renamed("aten.div.Tensor"),
    "aten._scaled_mm": _scaled_mm,
    "aten.avg_pool2d_backward": _avg_pool2d_backward,
}
