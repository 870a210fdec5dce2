"""Ops of the IR, appended one after the other while a graph is read; the only writer of a captured function's body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from moaic.ir.graph import Attr, Location, Op, Operand, Value
from moaic.ir.op_names import FOLD_KEY, RAND
from moaic.ir.types import TensorType

_VIEWS: Final = frozenset(
    {
        "aten.view",
        "aten.permute",
        "aten.expand",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.split_with_sizes",
        "aten.view_as_complex",
        "aten.view_as_real",
    }
)
"""Ops whose result may share the memory of their operand."""


class BodyWriter:
    """The ops so far, the op that defines each value, and the location that new ops get."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.producers: dict[Value, Op] = {}
        self.key = Value(TensorType("i64", (2,)), "key")
        self.draws = 0
        """Draws of random numbers so far; the function takes `key` as a parameter if there are any."""
        self.loc = Location()
        self._owned: set[Value] = set()

    def emit(self, name: str, operands: Sequence[Operand], type_: TensorType, **attrs: Attr) -> Value:
        """Append an op with one result."""
        return self.emit_many(name, operands, [type_], attrs)[0]

    def emit_many(
        self, name: str, operands: Sequence[Operand], types: Sequence[TensorType], attrs: Mapping[str, Attr]
    ) -> list[Value]:
        results = [Value(type_) for type_ in types]
        op = Op(name, tuple(operands), tuple(results), dict(attrs), self.loc)
        self.ops.append(op)
        self.producers.update(dict.fromkeys(results, op))
        return results

    def operand_behind(self, value: Value, name: str) -> tuple[Value, Mapping[str, Attr]] | None:
        """Operand and attributes of the op that defines `value`; None unless that op is called `name`."""
        op = self.producers.get(value)
        if op is None or op.name != name:
            return None
        (source,) = op.inputs()
        return source, op.attrs

    def rand(self, shape: tuple[int, ...]) -> Value:
        """Uniform numbers in [0, 1), f32, from a key that is folded from the function's key and the draw's number."""
        here = self.loc
        # The instance numbers the draws of the whole program, so the op belongs to no layer.
        self.loc = Location(here.file, here.line, "", here.side)
        key = self.emit(FOLD_KEY, [self.key], self.key.type, instance=self.draws)
        self.loc = here
        self.draws += 1
        return self.emit(RAND, [key], TensorType("f32", shape))

    def permuted(self, value: Value, order: tuple[int, ...]) -> Value:
        """`value` with its dims in `order`."""
        if order == tuple(range(len(order))):
            return value
        type_ = TensorType(value.type.dtype, tuple(value.type.shape[dim] for dim in order))
        return self.emit("aten.permute", [value], type_, dims=order)

    def complex_number(self, number: complex, dtype: str) -> Value:
        """A complex scalar: literals hold real numbers only, so it is made of two."""
        real = TensorType("f64" if dtype == "c128" else "f32", ())
        parts = [
            self.emit("aten.full", (), real, size=(), fill_value=part, dtype=real.dtype)
            for part in (number.real, number.imag)
        ]
        return self.emit("aten.complex", parts, TensorType(dtype, ()))

    def owned(self, value: Value) -> Value:
        """`value`, or a copy if a parameter or an earlier result shares its memory.

        After the program autograd or the user may write a result in place, which must change no other one.

            %r = aten.view %x                      %v = aten.view %x
            return %r           # %x: parameter    %r = aten.clone %v
        """
        root = value
        while (op := self.producers.get(root)) is not None and op.name in _VIEWS:
            root = next(op.inputs())
        if root in self.producers and root not in self._owned:
            self._owned.add(root)
            return value
        producer = self.producers.get(value)
        self.loc = Location() if producer is None else producer.loc
        return self.emit("aten.clone", [value], value.type)
