"""Placement of eager ops: the placements that an op requires of its operands, and those of its results.

An elementwise op runs on the shards that the workers hold, a reduction reduces shards and combines the partial results,
every other op runs on replicas:

    x.mul(y)   x, y: sharded on dim 0      -> the result is sharded on dim 0
    x.sum(0)   x: sharded on dim 0         -> each rank sums its shard; the partial sums are added
    x.sort()   x: sharded on dim 0         -> x is gathered; every rank sorts its replica

A decision depends on the op, the form of its arguments and the operands' placements, never on values, so it is made
once for each such case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Final

from moaic.ir.errors import Diagnostic
from moaic.ir.layout import Split, elements_of, is_uneven
from moaic.ir.types import FLOATING, HALF
from moaic.runtime.controller.buffer import Buffer, View
from moaic.runtime.controller.eager_call import CallForm, EagerCall, OperandForm
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.protocol.aten_schema import signature
from moaic.runtime.protocol.combination import REDUCTIONS, WIDENED, Combination, UnpaddedDim
from moaic.runtime.protocol.operation import ArgSpec, ViewGeometry
from moaic.runtime.protocol.placement import Placement, alike, everywhere, sharing, tiles

NOT_ELEMENTWISE: Final = frozenset({"_foreach_norm", "_foreach_max", "_foreach_powsum"})
"""List ops that reduce each of their tensors, by packet."""

ALSO_ELEMENTWISE: Final = frozenset(
    {
        "copy_",
        "copy",
        "fill_",
        "zero_",
        "_to_copy",
        "clone",
        "masked_fill_",
        "zeros_like",
        "ones_like",
        "full_like",
        "empty_like",
        "where",
        "lerp",
        "lerp_",
        "detach_copy",
        "alias_copy",
        "nan_to_num",
        "nan_to_num_",
        "_fused_adam_",
        "_fused_adamw_",
        "_fused_sgd_",
        "_fused_adagrad_",
    }
)
"""Elementwise ops that torch does not mark as such, by packet."""


DIVISIONS: Final = frozenset(
    {"div", "div_", "floor_divide", "floor_divide_", "fmod", "fmod_", "remainder", "remainder_"}
)
"""Ops that raise where a whole number is divided by zero, by packet."""


@cache
def is_elementwise(op: str) -> bool:
    """Whether an op is elementwise. Raises Diagnostic for a random op: each worker would draw other numbers."""
    called = signature(op)
    if called.is_random:
        raise Diagnostic(f"{op} draws random numbers and cannot run on the workers as it is")
    listed = called.packet.startswith("_foreach_") and called.packet not in NOT_ELEMENTWISE
    return listed or "pointwise" in called.tags or called.packet in ALSO_ELEMENTWISE


@dataclass(frozen=True, slots=True)
class PlacedOperand:
    """The properties of a view on which a decision depends."""

    shape: tuple[int, ...]
    buffer_shape: tuple[int, ...]
    dtype: str
    geometry: ViewGeometry | None
    place: Placement | None
    position: int
    """Index in its list; -1 outside of lists."""
    written: bool


def operands(call: EagerCall) -> tuple[PlacedOperand, ...]:
    """The operands of `call`, in order."""
    offsets = iter(call.offsets)
    listed = zip(call.buffers, call.form.operands, call.form.positions, strict=True)
    return tuple(_operand(_view(buffer, form, offsets), *position) for buffer, form, position in listed)


def _view(buffer: Buffer, form: OperandForm, offsets: Iterator[int]) -> View:
    if form.view is None:
        return View(buffer, buffer.shape, buffer.strides, 0, form.dtype)
    return View(buffer, *form.view, next(offsets), form.dtype)


def _operand(view: View, position: int, written: bool) -> PlacedOperand:
    buffer = view.buffer
    return PlacedOperand(view.shape, buffer.shape, buffer.dtype, geometry_of(view), buffer.place, position, written)


def geometry_of(view: View) -> ViewGeometry | None:
    """The geometry with which a worker makes the view from its buffer; None for a view of the whole buffer."""
    if view.is_whole:
        return None
    return ViewGeometry(view.buffer.strides, view.shape, view.strides, view.offset, DTYPE_NAMES[view.dtype])


@dataclass(frozen=True, slots=True)
class EagerPlacement:
    """The placements of an op: for each operand on the ranks that use it, and for each result."""

    required: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    combination: Combination | None = None
    """The combination of partial results; None if the results of shards are shards of the results."""
    kwargs: tuple[tuple[str, ArgSpec], ...] = ()
    """Keyword arguments added to the call."""


def initial_placements(op: str, given: Sequence[PlacedOperand], workers: int) -> tuple[Placement | None, ...]:
    """The placements for operands that no worker holds yet, chosen by the others; None for operands with one."""
    decision = _decide([each for each in given if each.place is not None], op, given, workers, (None,))
    return tuple(
        required if each.place is None else None for each, required in zip(given, decision.required, strict=True)
    )


def decide(form: CallForm, given: Sequence[PlacedOperand], workers: int) -> EagerPlacement:
    """The placements of an op whose operands all have one."""
    reduced = _reduced(form, given) if form.op in REDUCTIONS else None
    return reduced or _decide(given, form.op, given, workers, [output.shape for output in form.outputs])


def _decide(
    placed: Sequence[PlacedOperand],
    op: str,
    given: Sequence[PlacedOperand],
    workers: int,
    outputs: Sequence[tuple[int, ...] | None],
) -> EagerPlacement:
    is_spread = any(each.place is not None and not each.place.is_whole for each in placed)
    if is_elementwise(op) and is_spread and not _divides_by_padding(op, placed):
        decision = _sharded(given, outputs)
        if decision is not None:
            return decision
    place = _replicated_place(placed, workers)
    return EagerPlacement((place,) * len(given), (place,) * len(outputs))


def _divides_by_padding(op: str, placed: Sequence[PlacedOperand]) -> bool:
    """Whether an op divides whole numbers that have padding, which may be zero: the kernels of CPUs raise."""
    return signature(op).packet in DIVISIONS and any(
        each.dtype not in FLOATING and each.place is not None and any(_unpadded(each.buffer_shape, each.place, None))
        for each in placed
    )


def _replicated_place(placed: Sequence[PlacedOperand], workers: int) -> Placement:
    """The placement of an op on unsharded values: the one that all operands share, else replicated everywhere.

    An op runs on every holder of what it writes, so that a failed one leaves all replicas alike.
    """
    places = {each.place for each in placed if each.place is not None}
    if len(places) == 1 and next(iter(places)).is_uncut:
        return next(iter(places))
    if any(not place.is_whole for place in places):
        return everywhere(workers)
    written = max((each.place.mesh.ranks for each in placed if each.written and each.place), default=0)
    return everywhere(max(written, min((place.mesh.ranks for place in places), default=workers)))


def _sharded(given: Sequence[PlacedOperand], outputs: Sequence[tuple[int, ...] | None]) -> EagerPlacement | None:
    """The placements of an elementwise op on shards, per position of its lists; None if it cannot run on shards."""
    shared = [each for each in given if each.position < 0]
    is_list = len(shared) < len(given)
    if is_list and any(prod(each.shape) != 1 for each in shared):
        return None
    groups: dict[int, list[PlacedOperand]] = {}
    for each in given:
        groups.setdefault(each.position if is_list else 0, []).append(each)
    groups.pop(-1, None)
    targets = {position: _target(group) for position, group in groups.items()}
    known = {position: target for position, target in targets.items() if target is not None}
    if len(known) < len(targets):
        return None
    required: list[Placement] = []
    for each in given:
        if each.position < 0 and is_list:
            required.append(_for_all(known.values()))
            continue
        place, shape = known[each.position if is_list else 0]
        needed = _projected(place, shape, each.shape)
        if each.geometry is not None and not needed.is_uncut:
            return None
        required.append(needed)
    results = tuple(
        known[index if is_list else 0][0] for index in range(len(outputs)) if (index if is_list else 0) in known
    )
    if len(results) < len(outputs):
        return None
    return EagerPlacement(tuple(required), results)


def _reduced(form: CallForm, given: Sequence[PlacedOperand]) -> EagerPlacement | None:
    """The placements of a reduction of shards; None if no operand is sharded, or the shards cannot be combined."""
    places = [each.place for each in given if each.place is not None]
    if all(place.is_uncut for place in places) and len(set(places)) == 1:
        return None
    if any(each.place and each.geometry is not None and not each.place.is_uncut for each in given):
        return None
    arguments = _arguments(form)
    order = arguments.get("ord", 2)
    if any(place.layout.partial for place in places) or not isinstance(order, int | float) or order <= 0:
        return None
    dims = _dims(arguments.get("dim"), len(given[0].shape)) if given[0].position < 0 else None
    unpadded = tuple(tuple(_unpadded(each.shape, place, dims)) for each, place in zip(given, places, strict=True))
    if any(unpadded) and REDUCTIONS[form.op] == "mean":
        return None
    if dims is not None:
        kept, groups = _kept(places[0], dims, keep=bool(arguments.get("keepdim"))), ()
        if len(kept.layout.splits) < len(places[0].layout.splits):
            groups = sharing(kept)
    else:
        kept = everywhere(max(place.holders[-1] for place in places) + 1)
        groups = (kept.holders,)
    combination = Combination(
        REDUCTIONS[form.op],
        float(order),
        groups,
        tuple(_one_per_part(place, groups, uneven) for place, uneven in zip(places, unpadded, strict=True)),
        tuple(kept.layout.local_shape(output.shape, kept.mesh) for output in form.outputs),
        tuple(output.dtype for output in form.outputs),
        unpadded,
    )
    if not groups:
        return EagerPlacement(tuple(places), (kept,) * len(form.outputs))
    return EagerPlacement(tuple(places), (kept,) * len(form.outputs), combination, _widening(form, combination))


def _widening(form: CallForm, combination: Combination) -> tuple[tuple[str, ArgSpec], ...]:
    """The keyword argument that keeps 16-bit partial results in a wider type until they are combined."""
    is_narrow = combination.by in WIDENED and any(dtype in HALF for dtype in combination.dtypes)
    if not is_narrow or "dtype" in signature(form.op).names[: len(form.args)]:
        return ()
    return (("dtype", ("dtype", "f64" if "f64" in combination.dtypes else "f32")),)


def _arguments(form: CallForm) -> dict[str, Any]:
    """The arguments that are not tensors, by name."""
    parts = [*zip(signature(form.op).names, form.args, strict=False), *form.kwargs]
    return {name: part[1] for name, part in parts if part[0] == "literal"}


def _dims(given: Any, rank: int) -> frozenset[int]:
    """The reduced dims; all dims if the call names none."""
    named: Sequence[int] = () if given is None else (given,) if isinstance(given, int) else given
    return frozenset(dim % rank for dim in named if rank) or frozenset(range(rank))


def _kept(place: Placement, dims: frozenset[int], *, keep: bool) -> Placement:
    """The placement of the result of a reduction over `dims`: the operand's splits of the remaining dims."""
    return place.with_splits(
        tuple(
            Split(split.axis, split.dim if keep else split.dim - sum(dim < split.dim for dim in dims), split.stride)
            for split in place.layout.splits
            if split.dim not in dims
        )
    )


def _unpadded(shape: tuple[int, ...], place: Placement, dims: Collection[int] | None) -> Iterator[UnpaddedDim]:
    """The uneven dims among those that are reduced, which are all if none are given."""
    mesh = place.mesh
    for split in place.layout.splits:
        size = shape[split.dim]
        if (dims is None or split.dim in dims) and is_uneven(size, split.stride, mesh.size(split.axis)):
            at = (mesh.coordinates(rank)[split.axis] for rank in range(mesh.ranks))
            yield split.dim, tuple(elements_of(size, split.stride, index) for index in at)


def _one_per_part(
    place: Placement, groups: Sequence[Sequence[int]], unpadded: Sequence[UnpaddedDim]
) -> tuple[int, ...]:
    """One rank for each distinct part of a value in each group that is not empty, so that replicas count once."""
    held = [tile if all(sizes[rank] for _, sizes in unpadded) else None for rank, tile in enumerate(tiles(place))]
    first: dict[Any, int] = {}
    for number, group in enumerate(groups):
        for rank in group:
            if rank < len(held) and held[rank] is not None:
                first.setdefault((number, held[rank]), rank)
    return tuple(sorted(first.values()))


def fewer_replicas(written: PlacedOperand, given: Sequence[PlacedOperand]) -> Placement | None:
    """The placement of an operand on fewer of the holders of a replicated one that the op writes, if there is one."""
    places = [each.place for each in given if each.place is not None]
    assert written.place is not None
    if not all(place.is_uncut for place in places):
        return None
    fewest = min(places, key=lambda place: len(place.holders))
    return fewest if set(fewest.holders) < set(written.place.holders) else None


def serves(place: Placement, needed: Placement) -> bool:
    """Whether a value placed as `place` can be read as `needed` without resharding."""
    is_more = place.is_uncut and needed.is_uncut and set(needed.holders) <= set(place.holders)
    return is_more or alike(place, needed)


def _for_all(targets: Iterable[tuple[Placement, tuple[int, ...]]]) -> Placement:
    """The placement of an operand that all positions of the lists share: replicated on the ranks of all of them."""
    return everywhere(max(place.holders[-1] for place, _ in targets) + 1)


def _target(group: Sequence[PlacedOperand]) -> tuple[Placement, tuple[int, ...]] | None:
    """Placement and shape of the result of one list position, from its first sharded operand; None if unsupported."""
    written = [each.shape for each in group if each.written]
    shape = written[0] if written else _broadcast([each.shape for each in group])
    placed = [each for each in group if each.place is not None]
    leader = next((each for each in placed if each.place and not each.place.is_whole), None)
    if leader is None:
        ranks = min((each.place.mesh.ranks for each in placed if each.place), default=0)
        return (everywhere(ranks), shape) if ranks else None
    assert leader.place is not None
    if leader.place.layout.partial or leader.geometry is not None:
        return None
    shift = len(shape) - len(leader.shape)
    splits = tuple(Split(split.axis, split.dim + shift, split.stride) for split in leader.place.layout.splits)
    if shift < 0 or any(leader.shape[split.dim - shift] != shape[split.dim] for split in splits):
        return None
    return leader.place.with_splits(splits), shape


def _broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    longest = max(len(shape) for shape in shapes)
    padded = [(1,) * (longest - len(shape)) + shape for shape in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def _projected(place: Placement, shape: tuple[int, ...], operand: tuple[int, ...]) -> Placement:
    """The placement of an operand that is broadcast to a result of shape `shape` and placement `place`."""
    shift = len(shape) - len(operand)
    splits = tuple(
        Split(split.axis, split.dim - shift, split.stride)
        for split in place.layout.splits
        if split.dim >= shift and operand[split.dim - shift] != 1
    )
    return place.with_splits(splits)
