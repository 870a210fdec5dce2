"""What a rule is made of that finds the ops of which one of our kernels can take the place.

Each finds them, forward or backward, by what their results are made of. What else reads one of them goes on reading it:
a rewrite replaces values. A value that another function made and kept is not known to be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.builder import OpBuilder
from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.types import TensorType
from moaic.runtime.kernels.gains import KernelShape
from moaic.runtime.kernels.operators import NAMESPACE
from moaic.runtime.kernels.patterns.match import CAST, Found, OpPattern, Sight


@dataclass(frozen=True, slots=True)
class Replacement:
    """Ops of one kernel, and what they make instead of what."""

    kernel: str
    shape: KernelShape
    element: str
    ops: Sequence[Op]
    instead: Mapping[Value, Value]
    gone: Sequence[Value] = ()
    """What nobody may need any longer."""


KernelRule = Callable[[Sight, Op], Replacement | None]
"""What becomes of the ops of which this one is the anchor."""


@dataclass(slots=True)
class Work(OpBuilder):
    """The ops that a rule writes."""

    def call(self, name: str, operands: Sequence[Operand], kinds: Sequence[TensorType], **attrs: Attr) -> list[Value]:
        """All results of an operator."""
        results = tuple(Value(kind) for kind in kinds)
        self.ops.append(Op(f"{NAMESPACE}.{name}", tuple(operands), results, attrs, self.loc))
        return list(results)

    def like(self, value: Value, other: Value) -> Value:
        """`value` with the shape and the element type of another one."""
        kind = other.type
        if value.type.shape != kind.shape:
            value = self.emit("aten.view", [value], replace(value.type, shape=kind.shape), size=kind.shape)
        return value if value.type == kind else self.emit(CAST, [value], kind, dtype=kind.dtype)


def wide(kind: TensorType, *shape: int) -> TensorType:
    """Of what kernels keep of a value of this type."""
    return TensorType("f64" if kind.dtype == "f64" else "f32", shape)


def ways(sight: Sight, pattern: OpPattern, anchor: Op) -> Iterator[Found]:
    """In which the op makes its result as the pattern says."""
    return sight.matches(pattern, anchor.results[0]) if anchor.name == pattern.op else iter(())


def first(
    sight: Sight, pattern: OpPattern, found: Found, holds: Callable[[Found], bool] = lambda _: True
) -> Found | None:
    """The first way in which any value of the function is made as the pattern says; it is called `result` there."""
    named = replace(pattern, name="result")
    start = replace(found, values={name: value for name, value in found.values.items() if name != "result"})
    ways = (each for value in sight.makers for each in sight.matches(named, value, start))
    return next(filter(holds, ways), None)


def rows(x: Value) -> KernelShape:
    """How many rows of the last dim there are, and how long they are."""
    *_, width = x.type.shape
    return x.type.elements() // max(width, 1), width


def is_norm(found: Found, *of_rows: str) -> bool:
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


def summands(sight: Sight, value: Value) -> tuple[Value, Value] | None:
    """Two values of one type whose sum it is."""
    op = sight.makers.get(value)
    if op is None or op.name != "aten.add.Tensor" or op.attrs:
        return None
    one, other = op.operands
    if not isinstance(one, Value) or not isinstance(other, Value) or not one.type == other.type == value.type:
        return None
    return one, other


def as_type(sight: Sight, value: Value, kind: TensorType) -> Value:
    """The value cast to a type, where that is all that anybody does with it."""
    readers = sight.readers.get(value, ())
    is_cast = len(readers) == 1 and readers[0].name == CAST and readers[0].results[0].type == kind
    return readers[0].results[0] if is_cast and value not in sight.function.results else value


def with_other_way(sight: Sight, value: Value) -> tuple[Value, Value | None]:
    """The sum of a gradient and that which comes another way, and the latter; or the gradient alone."""
    readers = sight.readers.get(value, ())
    pair = summands(sight, readers[0].results[0]) if len(readers) == 1 else None
    if pair is None or value in sight.function.results or pair[0] is pair[1]:
        return value, None
    one, other = pair
    return readers[0].results[0], other if one is value else one
