"""A builder of the ops that one rank runs for an op whose part depends on the rank's coordinates.

A look-up in a split dim returns zero for elements of other ranks, so that the ranks' results are a partial sum. A write
into a split dim is done by the rank that holds the element. Ranges and causal masks begin at the rank's part. `ir/ops`
declares which ops these are and emits their parts by this builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moaic.ir.builder import OpBuilder
from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.layout import FULLY_REPLICATED, Layout, Mesh, Split
from moaic.ir.types import TensorType

INDEX = "i64"


@dataclass(frozen=True, slots=True)
class LocalIndex:
    """An index into a split dim, as the rank sees it."""

    here: Value
    """Bools: whether the rank holds the element."""
    index: Value
    """The index among the elements that the rank holds; 0 for an element elsewhere."""


@dataclass(slots=True)
class PartBuilder(OpBuilder):
    """The ops written so far in place of one op."""

    new: Op
    """The op on local types; the last written op defines its results."""
    coordinates: Mapping[str, Value]
    """The rank's coordinate, i64[], by axis."""
    mesh: Mesh

    def finish(self, name: str, operands: Sequence[Operand], **attrs: Attr) -> None:
        """The last op: its results are those of the op that is replaced."""
        self.ops.append(Op(name, tuple(operands), self.new.results, attrs, self.loc))

    def with_number(self, name: str, value: Value, other: int) -> Value:
        """An elementwise op of a value and a literal."""
        return self.emit(name, [value, None], value.type, other=other)

    def view(self, value: Value, shape: tuple[int, ...]) -> Value:
        """`value` with more or fewer dims of size one at its end."""
        tensor = TensorType(value.type.dtype, shape, value.type.layout)
        return value if value.type.shape == shape else self.emit("aten.view", [value], tensor, size=shape)

    def both(self, one: Value, other: Value) -> Value:
        return self.emit("aten.logical_and", [one, other], broadcast_type("bool", one, other))

    def kept(self, here: Value, value: Value) -> Value:
        """`value` where `here` is true, else zero; partial where `value` is."""
        tensor = broadcast_type(value.type.dtype, here, value)
        return self.emit(MASKED_FILL, [value, self.elsewhere(here)], tensor, value=zero_of(value))

    def finish_kept(self, here: Value, value: Value) -> None:
        """`kept` as the last op."""
        self.finish(MASKED_FILL, [value, self.elsewhere(here)], value=zero_of(value))

    def elsewhere(self, here: Value) -> Value:
        return self.emit("aten.logical_not", [here], here.type)

    def splits(self, value: Value, dim: int) -> list[Split]:
        """The splits of a dim over axes whose coordinates are given, the smallest stride first."""
        taken = [split for split in value.type.layout.on_dim(dim) if split.axis in self.coordinates]
        return sorted(taken, key=lambda split: split.stride)

    def at(self, axis: str) -> Value:
        """The rank's coordinate on `axis`."""
        return self.view(self.coordinates[axis], ())

    def place(self, index: Value, size: int, splits: Sequence[Split]) -> LocalIndex:
        """The element that `index` names in a dim of `size`, one split after another from the largest stride on."""
        here: Value | None = None
        for split in reversed(splits):
            n = self.mesh.size(split.axis)
            digit = self.with_number("aten.floor_divide", index, split.stride)
            outer = split.stride * n
            if outer != size:
                digit = self.with_number("aten.remainder.Scalar", digit, n)
            mine = self.emit("aten.eq.Tensor", [digit, self.at(split.axis)], truth_type(index))
            here = mine if here is None else self.both(here, mine)
            within = self.with_number("aten.remainder.Scalar", index, split.stride)
            if outer != size:
                above = self.with_number("aten.floor_divide", index, outer)
                above = self.emit("aten.mul.Tensor", [above, None], index.type, other=split.stride)
                within = self.emit("aten.add.Tensor", [above, within], index.type)
            index, size = within, size // n
        assert here is not None
        return LocalIndex(here, self.kept(here, index))

    def positions(self, length: int, splits: Sequence[Split], layout: Layout = FULLY_REPLICATED) -> Value:
        """Indices into the global dim of the rank's `length` elements; `layout` is that over the other axes."""
        tensor = TensorType(INDEX, (length,), layout)
        along = self.emit("aten.arange.start_step", [], tensor, start=0, end=length, dtype=INDEX)
        # From the smallest stride on: digits below a split are final when its coordinate is inserted above them.
        for split in splits:
            at = self.emit("aten.mul.Tensor", [self.at(split.axis), None], TensorType(INDEX, ()), other=split.stride)
            outer = self.with_number("aten.floor_divide", along, split.stride)
            outer = self.with_number("aten.mul.Tensor", outer, split.stride * self.mesh.size(split.axis))
            within = self.with_number("aten.remainder.Scalar", along, split.stride)
            along = self.emit("aten.add.Tensor", [outer, within], tensor)
            along = self.emit("aten.add.Tensor", [along, at], tensor)
        return along


MASKED_FILL = "aten.masked_fill.Scalar"


def zero_of(value: Value) -> Attr:
    """The literal zero of the kind of a value."""
    return 0 if value.type.dtype.startswith(("i", "u")) else 0.0


def truth_type(value: Value) -> TensorType:
    """The type of a comparison with `value`."""
    return TensorType("bool", value.type.shape, value.type.layout)


def broadcast_type(dtype: str, one: Value, other: Value) -> TensorType:
    """The type to which two values broadcast; the layout is that of the one which has its shape."""
    a, b = one.type.shape, other.type.shape
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    shape = tuple(right if left == 1 else left for left, right in pairs)
    return TensorType(dtype, shape, (one if a == shape else other).type.layout)


def operand_at(op: Op, index: int) -> Value:
    value = op.operands[index]
    assert isinstance(value, Value)
    return value


def over_last_dims(value: Value, rank: int) -> tuple[int, ...]:
    """The shape of `value` with `rank` more dims of size one."""
    return (*value.type.shape, *(1 for _ in range(rank)))
