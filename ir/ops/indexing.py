"""Look-ups and writes by index: embeddings, gather and scatter, advanced indexing.

A look-up into a split dim returns zero for elements of other ranks, so that the ranks' results are a partial sum. A
write into a split dim is done by the rank that holds the element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from moaic.ir.coordinate_dependent import INDEX, PartBuilder, operand_at, over_last_dims, truth_type
from moaic.ir.graph import Attr, Op, Value
from moaic.ir.layout import Layout, Split
from moaic.ir.ops.declaration import ByCoordinate, OpDecl, each
from moaic.ir.ops.refitting import dim_from_front, rows_in
from moaic.ir.ops.rule_building import (
    attr_int,
    factor_names,
    from_front,
    operand_types,
    result_types,
    rule_of_factors,
    whole_rule,
)
from moaic.ir.rules import Rule
from moaic.ir.types import TensorType

# Embeddings.


def _embedding(op: Op) -> Rule:
    """A split table is looked up in parts, each of which finds zero for the rows of the others."""
    ids = factor_names(len(operand_types(op)[1].shape), "i")
    return rule_of_factors(op, [["v", "d"], ids], [[*ids, "d"]], (0,))


def _embedding_here(work: PartBuilder, old: Op) -> None:
    """Before: %y = aten.embedding %w, %i : f32[8, 4] +tp, with %w: f32[10{tp}, 4].

    After: %j = the index among the rank's rows, 0 for an index elsewhere; %f = aten.embedding %w, %j : f32[8, 4]
           %y = aten.masked_fill.Scalar %f, %elsewhere {value = 0.0} : f32[8, 4]
    """
    table, ids = operand_at(old, 0), operand_at(work.new, 1)
    place = work.place(ids, table.type.shape[0], work.splits(table, 0))
    found = work.emit("aten.embedding", [work.new.operands[0], place.index], work.new.results[0].type)
    work.finish_kept(work.view(place.here, over_last_dims(place.here, 1)), found)


def _embedding_backward(op: Op) -> Rule:
    """A gradient that is divided by how often its row was looked up needs all look-ups."""
    counts = bool(op.attrs.get("scale_grad_by_freq", False))
    ids = [f"i{i}!" if counts else f"i{i}" for i, _ in enumerate(operand_types(op)[1].shape)]
    return rule_of_factors(op, [[*ids, "d"], ids], [["v!" if counts else "v", "d"]], (0,))


def _embedding_backward_here(work: PartBuilder, old: Op) -> None:
    grad, ids = operand_at(work.new, 0), operand_at(work.new, 1)
    (table,) = old.results
    place = work.place(ids, table.type.shape[0], work.splits(table, 0))
    here = place.here
    padding = attr_int(old, "padding_idx", -1)
    if padding >= 0:
        # The padding row has a global index, which the local op could not compare with: its gradients go here.
        here = work.both(here, work.emit("aten.ne.Scalar", [ids], here.type, other=padding))
    kept = work.kept(work.view(here, over_last_dims(here, 1)), grad)
    attrs: dict[str, Attr] = {"num_weights": work.new.results[0].type.shape[0], "padding_idx": -1}
    work.finish("aten.embedding_dense_backward", [kept, place.index], **{**old.attrs, **attrs})


# Gather and scatter.


def _gather(op: Op) -> Rule:
    """`aten.gather` and the scatters: dims other than the indexed one match where all their sizes do.

    The indexed dim splits too where each rank can tell its own elements: a look-up of an element elsewhere gives zero,
    a write to one is left out.
    """
    types = [*operand_types(op), *result_types(op)]
    rank = max(len(t.shape) for t in types)
    if any(len(t.shape) != rank for t in types):
        return whole_rule(op)
    indexed = from_front(attr_int(op, "dim"), rank)
    same = [i != indexed and len({t.shape[i] for t in types}) == 1 for i in range(rank)]
    specs = [[f"d{i}" if same[i] else f"t{k}d{i}!" for i in range(rank)] for k, _ in enumerate(types)]
    if op.name == "aten.gather" and rank:
        # Each element is looked up by itself, so index and result split along the dim, too.
        specs[1][indexed] = specs[2][indexed] = "g"
        specs[0][indexed] = "v" if types[0].dtype != "bool" else "v!"
    elif rank and all(same[i] for i in range(rank) if i != indexed) and _writes_apart(op, types, indexed):
        specs[0][indexed] = specs[-1][indexed] = "v"
    count = len(operand_types(op))
    linear = {"aten.gather": [(0,)], "aten.scatter_add": [(0, 2)]}.get(op.name, [])
    return rule_of_factors(op, specs[:count], specs[count:], *linear)


def _writes_apart(op: Op, types: list[TensorType], indexed: int) -> bool:
    """Whether parts of the base can be written independently: sums can, other writes if there is one index per row."""
    if op.name == "aten.scatter_add":
        return len({t.shape[indexed] for t in types[1:-1]}) == 1
    return all(t.shape[indexed] == 1 for t in types[1:-1])


def _indexed_dim(op: Op) -> Iterator[tuple[Value, int]]:
    yield operand_at(op, 0), dim_from_front(op)


def _gather_here(work: PartBuilder, old: Op) -> None:
    data, dim = operand_at(old, 0), dim_from_front(old)
    place = work.place(operand_at(work.new, 1), data.type.shape[dim], work.splits(data, dim))
    found = work.emit("aten.gather", [work.new.operands[0], place.index], work.new.results[0].type, **old.attrs)
    work.finish_kept(place.here, found)


def _scatter_here(work: PartBuilder, old: Op) -> None:
    """One index along the dim: each element compares its own position with it.

    Before: %y = aten.scatter.value %x, %i {dim = 1, value = 3} : f32[4, 8{tp}]
    After: %hit = aten.eq.Tensor (the rank's positions along dim 1), %i : bool[4, 4]
           %y = aten.where.self %hit, %three, %x : f32[4, 4]
    """
    base, index = operand_at(work.new, 0), operand_at(work.new, 1)
    dim, whole = dim_from_front(old), operand_at(old, 0)
    along = _positions_along(work, base, dim, work.splits(whole, dim))
    hit = work.emit("aten.eq.Tensor", [along, index], truth_type(base))
    if old.name == "aten.scatter.src":
        source = work.new.operands[2]
    else:
        number = TensorType(base.type.dtype, ())
        source = work.emit("aten.full", [], number, size=(), fill_value=old.attrs["value"], dtype=number.dtype)
    work.finish("aten.where.self", [hit, source, base])


def _positions_along(work: PartBuilder, base: Value, dim: int, splits: Sequence[Split]) -> Value:
    """The global positions along a dim of `base`, as a tensor that broadcasts to it, with the layout of that dim."""
    length, rank = base.type.shape[dim], len(base.type.shape)
    rest = base.type.layout.on_dim(dim)
    along = work.positions(length, splits, Layout(tuple(replace(split, dim=0) for split in rest)))
    shape = (*(1 for _ in range(dim)), length, *(1 for _ in range(rank - 1 - dim)))
    return work.emit("aten.view", [along], TensorType(INDEX, shape, Layout(rest)), size=shape)


def _scatter_add_here(work: PartBuilder, old: Op) -> None:
    base, dim = operand_at(old, 0), dim_from_front(old)
    place = work.place(operand_at(work.new, 1), base.type.shape[dim], work.splits(base, dim))
    source = work.kept(place.here, operand_at(work.new, 2))
    work.finish("aten.scatter_add", [work.new.operands[0], place.index, source], **old.attrs)


# Advanced indexing.


def index_dims(op: Op) -> tuple[list[str], list[str], list[list[str]]] | None:
    """Factor names of (data, indexed result, indices) for advanced indexing; None where only the whole rule holds."""
    data, indices = op.operands[0], op.operands[1]
    assert isinstance(data, Value)
    assert isinstance(indices, tuple)
    given = [(i, index) for i, index in enumerate(indices) if index is not None]
    if any(index.type.dtype == "bool" for _, index in given):
        return None
    rank = max(len(index.type.shape) for _, index in given)
    shared = factor_names(rank, "i")
    names = [f"v{i}" if any(i == at for at, _ in given) else f"d{i}" for i in range(len(data.type.shape))]
    positions = [at for at, _ in given]
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    kept = [n for n in names if n.startswith("d")]
    before = len([n for n in names[: positions[0]] if n.startswith("d")]) if adjacent else 0
    out = [*kept[:before], *shared, *kept[before:]]
    return names, out, [shared[rank - len(index.type.shape) :] for _, index in given]


def _whole_indexed(names: list[str]) -> list[str]:
    return [f"{name}!" if name.startswith("v") else name for name in names]


def _index(op: Op) -> Rule:
    """A split of an indexed dim finds zero for elements elsewhere; bools are no sums, so theirs is whole."""
    dims = index_dims(op)
    if dims is None:
        return whole_rule(op)
    names, out, indices = dims
    if operand_types(op)[0].dtype == "bool":
        names = _whole_indexed(names)
    return rule_of_factors(op, [names, *indices], [out], (0,))


def _index_put(op: Op) -> Rule:
    """Accumulating: the index dims are summed over, so base and values are partial together."""
    dims = index_dims(op)
    values = op.operands[2]
    assert isinstance(values, Value)
    if dims is None:
        return whole_rule(op)
    names, out, indices = dims
    accumulate = bool(op.attrs.get("accumulate", False))
    if not accumulate:
        names = _whole_indexed(names)
        free = {n for n in names if not n.endswith("!")}
        out = [n if n in free else f"{n}!" for n in out]
        indices = [[f"{n}!" for n in index] for index in indices]
    rank = len(values.type.shape)
    linear = [(0, 2)] if accumulate else []
    rule = rule_of_factors(op, [names, *indices, out[len(out) - rank :]], [names], *linear)
    if not accumulate:
        return rule
    # Splitting an index dim would add the base once per rank: the base must be partial, which no factor expresses.
    summed = {n for index in indices for n in index}
    return Rule(rule.operands, rule.results, rule.sizes, rule.whole | summed, rule.linear)


def _indexed_dims(op: Op) -> Iterator[tuple[Value, int]]:
    indices = op.operands[1]
    assert isinstance(indices, tuple)
    yield from ((operand_at(op, 0), dim) for dim, index in enumerate(indices) if index is not None)


def _local_indices(work: PartBuilder, old: Op) -> tuple[Value, tuple[Value | None, ...]]:
    """Bools that say whether the rank holds the element, of the indices' shape, and indices into the rank's part."""
    data, indices = operand_at(old, 0), work.new.operands[1]
    assert isinstance(indices, tuple)
    here: Value | None = None
    local: list[Value | None] = []
    for dim, index in enumerate(indices):
        splits = work.splits(data, dim) if index is not None else []
        if index is None or not splits:
            local.append(index)
            continue
        # An index may count from the end of the global dim: the remainder makes it count from the front.
        size = data.type.shape[dim]
        place = work.place(work.with_number("aten.remainder.Scalar", index, size), size, splits)
        here = place.here if here is None else work.both(here, place.here)
        local.append(place.index)
    assert here is not None
    return here, tuple(local)


def _over_result(work: PartBuilder, old: Op, here: Value) -> Value:
    """`here` with the trailing dims of size one that let it broadcast to the result of an indexing of `old`'s data."""
    dims = index_dims(old)
    assert dims is not None
    _, out, _ = dims
    after = len(out) - 1 - max((i for i, name in enumerate(out) if name.startswith("i")), default=-1)
    if not any(name.startswith("i") for name in out):
        after = 0
    return work.view(here, over_last_dims(here, after))


def _index_here(work: PartBuilder, old: Op) -> None:
    here, local = _local_indices(work, old)
    found = work.emit("aten.index.Tensor", [work.new.operands[0], local], work.new.results[0].type)
    work.finish_kept(_over_result(work, old, here), found)


def _index_put_here(work: PartBuilder, old: Op) -> None:
    here, local = _local_indices(work, old)
    values = work.kept(_over_result(work, old, here), operand_at(work.new, 2))
    work.finish("aten.index_put", [work.new.operands[0], local, values], **old.attrs)


def _rows_of_table(op: Op) -> Iterator[tuple[Value, int]]:
    yield operand_at(op, 0), 0


def _rows_of_gradient(op: Op) -> Iterator[tuple[Value, int]]:
    yield op.results[0], 0


OPS = (
    OpDecl(
        "aten.embedding",
        _embedding,
        by_coordinate=ByCoordinate(_rows_of_table, _embedding_here),
        exact=True,
        looks_up=True,
    ),
    OpDecl(
        "aten.embedding_dense_backward",
        _embedding_backward,
        refit=rows_in("num_weights"),
        by_coordinate=ByCoordinate(_rows_of_gradient, _embedding_backward_here),
    ),
    OpDecl("aten.gather", _gather, by_coordinate=ByCoordinate(_indexed_dim, _gather_here), exact=True, looks_up=True),
    *each(
        "scatter.value scatter.src",
        OpDecl("aten.*", _gather, by_coordinate=ByCoordinate(_indexed_dim, _scatter_here), exact=True),
    ),
    OpDecl("aten.scatter_add", _gather, by_coordinate=ByCoordinate(_indexed_dim, _scatter_add_here)),
    OpDecl(
        "aten.index.Tensor", _index, by_coordinate=ByCoordinate(_indexed_dims, _index_here), exact=True, looks_up=True
    ),
    OpDecl("aten.index_put", _index_put, by_coordinate=ByCoordinate(_indexed_dims, _index_put_here)),
)
