"""Building blocks of the rules that find ops which a kernel can replace.

A rule matches the ops, of a forward or a backward, by the values that they compute, and replaces these values. Other
readers of a replaced value read the new one. A value that another function computed and saved matches no pattern of
ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.builder import OpBuilder
from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.types import TensorType
from moaic.runtime.kernels.gains import KernelShape
from moaic.runtime.kernels.operators import NAMESPACE
from moaic.runtime.kernels.patterns.match import CAST, DefUse, Match, OpPattern


@dataclass(frozen=True, slots=True)
class Replacement:
    """The ops of one kernel, and the values that their results replace."""

    kernel: str
    shape: KernelShape
    element: str
    ops: Sequence[Op]
    instead: Mapping[Value, Value]
    gone: Sequence[Value] = ()
    """Values that must have no reader after the rewrite."""


KernelRule = Callable[[DefUse, Op], Replacement | None]
"""Returns the replacement of the ops that end in a given op, the anchor; None if they do not match."""


@dataclass(slots=True)
class KernelBuilder(OpBuilder):
    """Collects the ops that a rule writes."""

    def call(self, name: str, operands: Sequence[Operand], kinds: Sequence[TensorType], **attrs: Attr) -> list[Value]:
        """Append a call of an operator; return its results."""
        results = tuple(Value(kind) for kind in kinds)
        self.ops.append(Op(f"{NAMESPACE}.{name}", tuple(operands), results, attrs, self.loc))
        return list(results)

    def like(self, value: Value, other: Value) -> Value:
        """`value` with the shape and the element type of `other`."""
        kind = other.type
        if value.type.shape != kind.shape:
            value = self.emit("aten.view", [value], replace(value.type, shape=kind.shape), size=kind.shape)
        return value if value.type == kind else self.emit(CAST, [value], kind, dtype=kind.dtype)


def wide(kind: TensorType, *shape: int) -> TensorType:
    """The type in which kernels return statistics of values of type `kind`."""
    return TensorType("f64" if kind.dtype == "f64" else "f32", shape)


def matches(uses: DefUse, pattern: OpPattern, anchor: Op) -> Iterator[Match]:
    """Yield each match of a pattern with the result of an op."""
    return uses.matches(pattern, anchor.results[0]) if anchor.name == pattern.op else iter(())


def first(
    uses: DefUse, pattern: OpPattern, found: Match, holds: Callable[[Match], bool] = lambda _: True
) -> Match | None:
    """The first match of a pattern with any value of the function, which is bound to `result`."""
    named = replace(pattern, name="result")
    start = replace(found, values={name: value for name, value in found.values.items() if name != "result"})
    found_in = (each for value in uses.makers for each in uses.matches(named, value, start))
    return next(filter(holds, found_in), None)


def rows(x: Value) -> KernelShape:
    """The number of rows along the last dim, and their length."""
    *_, width = x.type.shape
    return x.type.elements() // max(width, 1), width


def is_norm(found: Match, *of_rows: str) -> bool:
    """Whether the shapes are those of a norm over the last dim, with these values one for each row."""
    *rows, width = found["x"].type.shape
    like_x = [found[name] for name in ("grad", "through", "result") if name in found.values]
    return (
        found.attrs["dim"] == (len(rows),)
        and found.attrs["width"] == width
        and all(found[name].type.shape == (*rows, 1) for name in of_rows)
        and found["weight"].type.shape == (width,)
        and all(value.type.shape == (*rows, width) for value in like_x)
    )


def summands(uses: DefUse, value: Value) -> tuple[Value, Value] | None:
    """The two values of equal type whose sum `value` is, if it is one."""
    op = uses.makers.get(value)
    if op is None or op.name != "aten.add.Tensor" or op.attrs:
        return None
    one, other = op.operands
    if not isinstance(one, Value) or not isinstance(other, Value) or not one.type == other.type == value.type:
        return None
    return one, other


def as_type(uses: DefUse, value: Value, kind: TensorType) -> Value:
    """The value cast to a type, if that cast is its only reader; else the value."""
    readers = uses.readers.get(value, ())
    is_cast = len(readers) == 1 and readers[0].name == CAST and readers[0].results[0].type == kind
    return readers[0].results[0] if is_cast and value not in uses.function.results else value


def with_other_way(uses: DefUse, value: Value) -> tuple[Value, Value | None]:
    """The sum of a gradient and that of other uses, with the latter; or the gradient alone."""
    readers = uses.readers.get(value, ())
    pair = summands(uses, readers[0].results[0]) if len(readers) == 1 else None
    if pair is None or value in uses.function.results or pair[0] is pair[1]:
        return value, None
    one, other = pair
    return readers[0].results[0], other if one is value else one
