"""One call of an FX graph on its way into the IR, and the few ops that several rewrites emit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moaic.capture.fx.body_writer import BodyWriter
from moaic.ir.graph import Attr, Operand, Value
from moaic.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call that becomes something else than one op of the same name."""

    builder: BodyWriter
    name: str
    operands: list[Operand]
    attrs: dict[str, Attr]
    types: list[TensorType]
    """The type of each result."""
    example_source: Any
    """The tracer's fake tensor for the first argument: strides and offset, which values of the IR do not have."""
    example_result: Any

    @property
    def x(self) -> Value:
        """The first operand, which is a tensor."""
        first = self.operands[0]
        assert isinstance(first, Value), self.name
        return first

    @property
    def type(self) -> TensorType:
        """The type of the first result."""
        return self.types[0]

    def emit(self, name: str, *operands: Operand, type_: TensorType | None = None, **attrs: Attr) -> Value:
        """Append an op whose result has the call's type or `type_`."""
        return self.builder.emit(name, operands, type_ or self.type, **attrs)

    def emit_as(self, name: str, operands: Sequence[Operand], attrs: Mapping[str, Attr]) -> Value:
        """Append an op with the call's type, and attributes whose names may be no identifiers."""
        return self.builder.emit_many(name, operands, [self.type], attrs)[0]


Rewrite = Callable[[OpCall], Any]
"""Emits the ops of a call; returns a value, or a list with one per result."""


def each_of(names: str, rewrite: Rewrite) -> dict[str, Rewrite]:
    """One rewrite for several ops; `names` are separated by spaces."""
    return dict.fromkeys(names.split(), rewrite)


def cast_to_result(call: OpCall, x: Value | None = None) -> Value:
    """`x`, or the first operand, with the element type of the call's result."""
    x = x or call.x
    dtype = call.type.dtype
    if x.type.dtype == dtype:
        return x
    return call.emit("aten._to_copy", x, type_=TensorType(dtype, x.type.shape), dtype=dtype)


def reshaped(call: OpCall, x: Value) -> Value:
    """`x` in the shape of the call's result; a view of a view becomes one view.

    %1 = aten.view %0 {size = (6, 4)}      %2 = aten.view %0 {size = (2, 12)}
    %2 = aten.view %1 {size = (2, 12)}
    """
    inner = call.builder.operand_behind(x, "aten.view")
    x = x if inner is None else inner[0]
    return x if x.type.shape == call.type.shape else call.emit("aten.view", x, size=call.type.shape)


def viewed(call: OpCall, x: Value, shape: tuple[int, ...]) -> Value:
    """`x` in another shape."""
    if x.type.shape == shape:
        return x
    return call.emit("aten.view", x, type_=TensorType(x.type.dtype, shape), size=shape)


def expanded(call: OpCall, x: Value, shape: tuple[int, ...]) -> Value:
    """`x` broadcast to `shape`."""
    if x.type.shape == shape:
        return x
    return call.emit("aten.expand", x, type_=TensorType(x.type.dtype, shape), size=shape)
