"""Ops whose parts depend on where they lie: what a rank makes of one once it knows its coordinates.

A look-up in a dim that is split finds what is here and zero for the rest, so that the ranks' results are a pending
sum; what is written into a split dim is written where it belongs and nowhere else; ranges and causal masks begin at the
place of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from moaic.ir.attention import ATTENTION, is_causal, mask_of, query_at, query_key_value
from moaic.ir.builder import Emitter
from moaic.ir.graph import Attr, Op, Operand, Value
from moaic.ir.layout import FULLY_REPLICATED, Layout, Mesh, Split
from moaic.ir.ops import attr_int, index_dims
from moaic.ir.types import TensorType

INDEX = "i64"


def placing(op: Op) -> Iterator[tuple[Value, int]]:
    """The dims whose split makes an op ask where it is, each as a value and one of its dims."""
    find = _PLACING.get(op.name)
    return iter(()) if find is None else find(op)


def placed_axes(op: Op, axes: Collection[str]) -> set[str]:
    """Those of `axes` whose coordinate the parts of `op` depend on."""
    return {split.axis for value, dim in placing(op) for split in value.type.layout.on_dim(dim)} & {*axes}


def placed(old: Op, new: Op, coordinates: Mapping[str, Value], mesh: Mesh) -> list[Op]:
    """What a rank runs for `old`, given the same op with local types: ops that read the coordinates."""
    work = _Work(new, coordinates, mesh, loc=new.loc)
    _MAKERS[old.name](work, old)
    return work.ops


@dataclass(frozen=True, slots=True)
class _Place:
    """For an index into a dim that is split: whether what it names is here, and the index among what is here."""

    here: Value
    index: Value


@dataclass(slots=True)
class _Work(Emitter):
    new: Op
    coordinates: Mapping[str, Value]
    mesh: Mesh

    def finish(self, name: str, operands: Sequence[Operand], **attrs: Attr) -> None:
        """The op that makes the result of the whole."""
        self.ops.append(Op(name, tuple(operands), self.new.results, attrs, self.loc))

    def numbers(self, name: str, value: Value, other: int) -> Value:
        return self.emit(name, [value, None], value.type, other=other)

    def view(self, value: Value, shape: tuple[int, ...]) -> Value:
        """`value` with more or fewer dims of size one at its end."""
        kind = TensorType(value.type.dtype, shape, value.type.layout)
        return value if value.type.shape == shape else self.emit("aten.view", [value], kind, size=shape)

    def both(self, one: Value, other: Value) -> Value:
        return self.emit("aten.logical_and", [one, other], _together("bool", one, other))

    def kept(self, here: Value, value: Value) -> Value:
        """`value` where it is here, else zero: a pending sum where `value` is one."""
        kind = _together(value.type.dtype, here, value)
        return self.emit(_FILL, [value, self.elsewhere(here)], kind, value=_zero(value))

    def finish_kept(self, here: Value, value: Value) -> None:
        self.finish(_FILL, [value, self.elsewhere(here)], value=_zero(value))

    def elsewhere(self, here: Value) -> Value:
        return self.emit("aten.logical_not", [here], here.type)

    def splits(self, value: Value, dim: int) -> list[Split]:
        """The splits of a dim by axes whose coordinates are given, the finest first."""
        taken = [split for split in value.type.layout.on_dim(dim) if split.axis in self.coordinates]
        return sorted(taken, key=lambda split: split.stride)

    def at(self, axis: str) -> Value:
        return self.view(self.coordinates[axis], ())

    def place(self, index: Value, size: int, splits: Sequence[Split]) -> _Place:
        """Where `index` into a dim of `size` points, digit by digit from the coarsest on."""
        here: Value | None = None
        for split in reversed(splits):
            n = self.mesh.size(split.axis)
            digit = self.numbers("aten.floor_divide", index, split.stride)
            outer = split.stride * n
            if outer != size:
                digit = self.numbers("aten.remainder.Scalar", digit, n)
            mine = self.emit("aten.eq.Tensor", [digit, self.at(split.axis)], _truth(index))
            here = mine if here is None else self.both(here, mine)
            within = self.numbers("aten.remainder.Scalar", index, split.stride)
            if outer != size:
                above = self.numbers("aten.floor_divide", index, outer)
                above = self.emit("aten.mul.Tensor", [above, None], index.type, other=split.stride)
                within = self.emit("aten.add.Tensor", [above, within], index.type)
            index, size = within, size // n
        assert here is not None
        return _Place(here, self.kept(here, index))

    def positions(self, length: int, splits: Sequence[Split], layout: Layout = FULLY_REPLICATED) -> Value:
        """The indices in the whole dim of the `length` elements that are here, `layout` being how they still lie."""
        kind = TensorType(INDEX, (length,), layout)
        along = self.emit("aten.arange.start_step", [], kind, start=0, end=length, dtype=INDEX)
        # From the finest digit on: what lies below a digit is in its final place when the digit is put in.
        for split in splits:
            at = self.emit("aten.mul.Tensor", [self.at(split.axis), None], TensorType(INDEX, ()), other=split.stride)
            outer = self.numbers("aten.floor_divide", along, split.stride)
            outer = self.numbers("aten.mul.Tensor", outer, split.stride * self.mesh.size(split.axis))
            within = self.numbers("aten.remainder.Scalar", along, split.stride)
            along = self.emit("aten.add.Tensor", [outer, within], kind)
            along = self.emit("aten.add.Tensor", [along, at], kind)
        return along


_FILL = "aten.masked_fill.Scalar"


def _zero(value: Value) -> Attr:
    return 0 if value.type.dtype.startswith(("i", "u")) else 0.0


def _truth(value: Value) -> TensorType:
    return TensorType("bool", value.type.shape, value.type.layout)


def _together(dtype: str, one: Value, other: Value) -> TensorType:
    """The type to which two values broadcast; it lies as the one that has its shape."""
    a, b = one.type.shape, other.type.shape
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b, strict=True)
    shape = tuple(right if left == 1 else left for left, right in pairs)
    return TensorType(dtype, shape, (one if a == shape else other).type.layout)


def _operand(op: Op, index: int) -> Value:
    value = op.operands[index]
    assert isinstance(value, Value)
    return value


def _dim_of(op: Op) -> int:
    rank = len(_operand(op, 0).type.shape)
    return attr_int(op, "dim") % rank if rank else 0


def _over_last(value: Value, rank: int) -> tuple[int, ...]:
    return (*value.type.shape, *(1 for _ in range(rank)))


# Embeddings.


def _embedding(work: _Work, old: Op) -> None:
    table, ids = _operand(old, 0), _operand(work.new, 1)
    place = work.place(ids, table.type.shape[0], work.splits(table, 0))
    found = work.emit("aten.embedding", [work.new.operands[0], place.index], work.new.results[0].type)
    work.finish_kept(work.view(place.here, _over_last(place.here, 1)), found)


def _embedding_backward(work: _Work, old: Op) -> None:
    grad, ids = _operand(work.new, 0), _operand(work.new, 1)
    (table,) = old.results
    place = work.place(ids, table.type.shape[0], work.splits(table, 0))
    here = place.here
    padding = attr_int(old, "padding_idx", -1)
    if padding >= 0:
        here = work.both(here, work.emit("aten.ne.Scalar", [ids], here.type, other=padding))
    kept = work.kept(work.view(here, _over_last(here, 1)), grad)
    attrs: dict[str, Attr] = {"num_weights": work.new.results[0].type.shape[0], "padding_idx": -1}
    work.finish("aten.embedding_dense_backward", [kept, place.index], **{**old.attrs, **attrs})


# Gather and scatter.


def _gather(work: _Work, old: Op) -> None:
    data, dim = _operand(old, 0), _dim_of(old)
    place = work.place(_operand(work.new, 1), data.type.shape[dim], work.splits(data, dim))
    found = work.emit("aten.gather", [work.new.operands[0], place.index], work.new.results[0].type, **old.attrs)
    work.finish_kept(place.here, found)


def _scatter_one(work: _Work, old: Op) -> None:
    """One index along the dim: each element compares its own with it."""
    base, index = _operand(work.new, 0), _operand(work.new, 1)
    dim, whole = _dim_of(old), _operand(old, 0)
    along = _along(work, base, dim, work.splits(whole, dim))
    hit = work.emit("aten.eq.Tensor", [along, index], _truth(base))
    if old.name == "aten.scatter.src":
        source = work.new.operands[2]
    else:
        number = TensorType(base.type.dtype, ())
        source = work.emit("aten.full", [], number, size=(), fill_value=old.attrs["value"], dtype=number.dtype)
    work.finish("aten.where.self", [hit, source, base])


def _along(work: _Work, base: Value, dim: int, splits: Sequence[Split]) -> Value:
    """The positions along a dim of `base`, as a tensor that broadcasts to it; it lies as that dim does."""
    length, rank = base.type.shape[dim], len(base.type.shape)
    rest = base.type.layout.on_dim(dim)
    along = work.positions(length, splits, Layout(tuple(replace(split, dim=0) for split in rest)))
    shape = (*(1 for _ in range(dim)), length, *(1 for _ in range(rank - 1 - dim)))
    return work.emit("aten.view", [along], TensorType(INDEX, shape, Layout(rest)), size=shape)


def _scatter_add(work: _Work, old: Op) -> None:
    base, dim = _operand(old, 0), _dim_of(old)
    place = work.place(_operand(work.new, 1), base.type.shape[dim], work.splits(base, dim))
    source = work.kept(place.here, _operand(work.new, 2))
    work.finish("aten.scatter_add", [work.new.operands[0], place.index, source], **old.attrs)


# Indexing.


def _index_places(work: _Work, old: Op) -> tuple[Value, tuple[Value | None, ...]]:
    """What is here, over the dims that the indices share, and the indices among what is here."""
    data, indices = _operand(old, 0), work.new.operands[1]
    assert isinstance(indices, tuple)
    here: Value | None = None
    local: list[Value | None] = []
    for dim, index in enumerate(indices):
        splits = work.splits(data, dim) if index is not None else []
        if index is None or not splits:
            local.append(index)
            continue
        place = work.place(_from_front(work, index, data.type.shape[dim]), data.type.shape[dim], splits)
        here = place.here if here is None else work.both(here, place.here)
        local.append(place.index)
    assert here is not None
    return here, tuple(local)


def _from_front(work: _Work, index: Value, size: int) -> Value:
    """Indices that count from the end made to count from the front."""
    return work.numbers("aten.remainder.Scalar", index, size)


def _over_result(work: _Work, old: Op, here: Value) -> Value:
    """`here` as it broadcasts to the result of an indexing of `old`'s data."""
    found = index_dims(old)
    assert found is not None
    _, out, _ = found
    after = len(out) - 1 - max((i for i, name in enumerate(out) if name.startswith("i")), default=-1)
    if not any(name.startswith("i") for name in out):
        after = 0
    return work.view(here, _over_last(here, after))


def _index(work: _Work, old: Op) -> None:
    here, local = _index_places(work, old)
    found = work.emit("aten.index.Tensor", [work.new.operands[0], local], work.new.results[0].type)
    work.finish_kept(_over_result(work, old, here), found)


def _index_put(work: _Work, old: Op) -> None:
    here, local = _index_places(work, old)
    values = work.kept(_over_result(work, old, here), _operand(work.new, 2))
    work.finish("aten.index_put", [work.new.operands[0], local, values], **old.attrs)


# Experts.


def _grouped_mm(work: _Work, old: Op) -> None:
    x, weight, ids = work.new.operands
    work.finish("moai.grouped_mm", [x, weight, _own(work, _operand(old, 1), ids)])


def _grouped_outer(work: _Work, old: Op) -> None:
    grad, x, ids = work.new.operands
    count = work.new.results[0].type.shape[0]
    work.finish("moai.grouped_outer", [grad, x, _own(work, old.results[0], ids)], count=count)


def _own(work: _Work, matrices: Value, ids: Operand) -> Value:
    """Which of the matrices that are here each row names; -1 for none."""
    assert isinstance(ids, Value)
    place = work.place(ids, matrices.type.shape[0], work.splits(matrices, 0))
    number = TensorType(INDEX, ())
    none = work.emit("aten.full", [], number, size=(), fill_value=-1, dtype=INDEX)
    return work.emit("aten.where.self", [place.here, place.index, none], place.index.type)


# Attention.


def _causal(work: _Work, old: Op) -> None:
    """The causal mask spelled out, beside the mask that there is."""
    query, key, _ = query_key_value(work.new)
    whole, _, _ = query_key_value(old)
    rows, columns = query.type.shape[2], key.type.shape[2]
    row = work.view(work.positions(rows, work.splits(whole, 2)), (rows, 1))
    kind = TensorType("bool", (rows, columns))
    allowed = work.emit("aten.le.Tensor", [work.positions(columns, ()), row], kind)
    given = mask_of(work.new)
    mask = allowed if given is None else _masked(work, allowed, given)
    operands = (*work.new.operands[: ATTENTION[old.name]], mask)
    work.ops.append(replace(work.new, operands=operands, attrs={**old.attrs, "is_causal": False}))


def _masked(work: _Work, allowed: Value, given: Value) -> Value:
    if given.type.dtype == "bool":
        return work.both(allowed, given)
    kind = TensorType(given.type.dtype, ())
    never = work.emit("aten.full", [], kind, size=(), fill_value=float("-inf"), dtype=kind.dtype)
    return work.emit("aten.where.self", [allowed, given, never], _together(kind.dtype, allowed, given))


# Ranges.


def _arange(work: _Work, old: Op) -> None:
    (result,), (whole,) = work.new.results, old.results
    start, step = (old.attrs.get(name, other) for name, other in (("start", 0), ("step", 1)))
    along = work.positions(result.type.shape[0], work.splits(whole, 0), result.type.layout)
    if result.type.dtype != INDEX:
        along = work.emit("aten._to_copy", [along], result.type, dtype=result.type.dtype)
    along = work.emit("aten.mul.Tensor", [along, None], result.type, other=step)
    work.finish("aten.add.Tensor", [along, None], other=start)


# Which dims place an op, and what it becomes.


def _first_operand(op: Op) -> Iterator[tuple[Value, int]]:
    yield _operand(op, 0), 0


def _first_result(op: Op) -> Iterator[tuple[Value, int]]:
    yield op.results[0], 0


def _second_operand(op: Op) -> Iterator[tuple[Value, int]]:
    yield _operand(op, 1), 0


def _named_dim(op: Op) -> Iterator[tuple[Value, int]]:
    yield _operand(op, 0), _dim_of(op)


def _index_list(op: Op) -> Iterator[tuple[Value, int]]:
    indices = op.operands[1]
    assert isinstance(indices, tuple)
    yield from ((_operand(op, 0), dim) for dim, index in enumerate(indices) if index is not None)


def _causal_rows(op: Op) -> Iterator[tuple[Value, int]]:
    if is_causal(op):
        yield _operand(op, query_at(op)), 2


_PLACING: Mapping[str, Callable[[Op], Iterator[tuple[Value, int]]]] = {
    "aten.embedding": _first_operand,
    "aten.embedding_dense_backward": _first_result,
    "aten.gather": _named_dim,
    "aten.scatter.value": _named_dim,
    "aten.scatter.src": _named_dim,
    "aten.scatter_add": _named_dim,
    "aten.index.Tensor": _index_list,
    "aten.index_put": _index_list,
    "moai.grouped_mm": _second_operand,
    "moai.grouped_outer": _first_result,
    "moai.sdpa": _causal_rows,
    "moai.sdpa_backward": _causal_rows,
    **dict.fromkeys(("aten.arange", "aten.arange.start", "aten.arange.start_step"), _first_result),
}

_MAKERS: Mapping[str, Callable[[_Work, Op], None]] = {
    "aten.embedding": _embedding,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.gather": _gather,
    "aten.scatter.value": _scatter_one,
    "aten.scatter.src": _scatter_one,
    "aten.scatter_add": _scatter_add,
    "aten.index.Tensor": _index,
    "aten.index_put": _index_put,
    "moai.grouped_mm": _grouped_mm,
    "moai.grouped_outer": _grouped_outer,
    "moai.sdpa": _causal,
    "moai.sdpa_backward": _causal,
    **dict.fromkeys(("aten.arange", "aten.arange.start", "aten.arange.start_step"), _arange),
}
