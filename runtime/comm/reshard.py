"""Moving a value from one layout to another: each collective of the IR, and conversions made of them.

A move changes the state of a value on one axis; which collective that is follows from the two states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moaic.ir.layout import FULLY_REPLICATED, PARTIAL, REPLICATED, Layout, Mesh, Split
from moaic.runtime.comm.transport import Group, SubAxis, Transport
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.placement import Placement
from moaic.runtime.protocol.tensor_parts import cut

LocalMove = Callable[[Tensor], Tensor]
"""From a rank's local tensor to its local tensor afterwards. May be, or share memory with, its argument."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a mesh, and how it talks to the others."""

    mesh: Mesh
    context: WorkerContext

    @property
    def rank(self) -> int:
        return self.context.rank

    @property
    def transport(self) -> Transport:
        return self.context.transport

    def group(self, axis: str) -> Group:
        return Group.of(self.mesh.group(self.rank, axis), self.rank)

    def index(self, axis: str) -> int:
        return self.mesh.coordinates(self.rank)[axis]


def move(seat: RankContext, axis: str, before: Layout, after: Layout, *, in_place: bool = False) -> LocalMove:
    """The move that takes a value from layout `before` to `after`, which differ on `axis` alone.

    `in_place`: the argument's memory may be used for the result.
    """
    count = seat.mesh.size(axis)
    old, new = before.state(axis), after.state(axis)
    if count == 1 or old == new:
        return _same
    if old == PARTIAL:
        return _all_reduce(seat, axis, in_place) if new == REPLICATED else _reduce_scatter(seat, axis, after)
    if old == REPLICATED:
        return _first(seat, axis, in_place) if new == PARTIAL else _shard(seat, axis, after)
    if new == REPLICATED:
        return _all_gather(seat, axis, before)
    if new == PARTIAL:
        raise ValueError(f"no move makes a split value a pending sum over {axis}")
    return _all_to_all(seat, axis, before, after)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _all_reduce(seat: RankContext, axis: str, in_place: bool) -> LocalMove:
    group, transport = seat.group(axis), seat.transport

    def run(tensor: Tensor) -> Tensor:
        out = owned(tensor, in_place and tensor.is_contiguous())
        transport.all_reduce(out, group)
        return out

    return run


def _reduce_scatter(seat: RankContext, axis: str, after: Layout) -> LocalMove:
    group, digit = seat.group(axis), _digit(after, axis, seat.mesh)
    return lambda tensor: seat.transport.reduce_scatter(tensor, group, digit)


def _all_gather(seat: RankContext, axis: str, before: Layout) -> LocalMove:
    group, digit = seat.group(axis), _digit(before, axis, seat.mesh)
    return lambda tensor: seat.transport.all_gather(tensor, group, digit)


def _shard(seat: RankContext, axis: str, after: Layout) -> LocalMove:
    digit = _digit(after, axis, seat.mesh)
    count, index = seat.mesh.size(axis), seat.index(axis)
    return lambda tensor: cut(tensor, *digit, count, index)


def _first(seat: RankContext, axis: str, in_place: bool) -> LocalMove:
    return _same if seat.index(axis) == 0 else torch.zeros_like


def _all_to_all(seat: RankContext, axis: str, before: Layout, after: Layout) -> LocalMove:
    (old, give_stride), (new, _) = _split(before, axis, seat.mesh), _split(after, axis, seat.mesh)
    if old.dim == new.dim and not _are_apart(old, new, seat.mesh.size(axis)):
        gather, shard = _all_gather(seat, axis, before), _shard(seat, axis, after)
        return lambda tensor: shard(gather(tensor))
    count, group = seat.mesh.size(axis), seat.group(axis)
    # While both digits are taken, a part is cut where the new digit lies in what the old one has left.
    inner = count if old.dim == new.dim and old.stride < new.stride else 1
    cut_stride = after.local_stride(new, seat.mesh) // inner
    inner = count if old.dim == new.dim and new.stride < old.stride else 1
    join_stride = give_stride // inner

    given, taken = SubAxis(new.dim, cut_stride), SubAxis(old.dim, join_stride)
    return lambda tensor: seat.transport.all_to_all(tensor, group, given, taken)


def _digit(layout: Layout, axis: str, mesh: Mesh) -> SubAxis:
    split, stride = _split(layout, axis, mesh)
    return SubAxis(split.dim, stride)


def _split(layout: Layout, axis: str, mesh: Mesh) -> tuple[Split, int]:
    """The split of `axis` and its stride in what the other axes leave."""
    split = layout.split_of(axis)
    assert split is not None, f"{axis} splits nothing in {layout}"
    return split, layout.local_stride(split, mesh)


def _are_apart(one: Split, other: Split, count: int) -> bool:
    """Whether two digits of one dim share no part of its index."""
    low, high = sorted((one.stride, other.stride))
    return high % (low * count) == 0


def is_shared(tensor: Tensor) -> bool:
    """Whether anything else uses the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore[reportPrivateUsage]


def own(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def dense(tensor: Tensor) -> Tensor:
    """Itself where it is contiguous, else a copy that is."""
    return tensor if tensor.is_contiguous() else own(tensor)


def owned(tensor: Tensor, free: bool) -> Tensor:
    """A tensor to write into: itself where its memory is free to be used and nothing else uses it, else a copy."""
    return tensor if free and not is_shared(tensor) else own(tensor)


def convert(conversion: Resharding, context: WorkerContext) -> Callable[[Tensor | None], Tensor | None]:
    """What one worker does: from its part before, if it has one, to its part after, if it gets one."""
    before, after = conversion.before, conversion.after
    if before.mesh == after.mesh and before.layout.owner == after.layout.owner:
        steps = _changes(before, before.layout, after.layout, context)
        return lambda tensor: _apply(steps, tensor)
    gather = _changes(before, before.layout, FULLY_REPLICATED, context)
    spread = _spread(conversion, context)
    cutting = _changes(after, FULLY_REPLICATED, after.layout, context)
    keeps = context.rank in after.holders

    def run(tensor: Tensor | None) -> Tensor | None:
        whole = spread(_apply(gather, tensor))
        return _apply(cutting, whole) if keeps else None

    return run


def meeting(conversion: Resharding, rank: int) -> tuple[int, ...]:
    """The ranks that carry out a conversion together, this one among them; none where there is nothing to be sent."""
    had, gets = set(conversion.before.holders), set(conversion.after.holders)
    is_local = conversion.before.is_uncut and gets <= had
    return () if is_local or rank not in had | gets else tuple(sorted(had | gets))


def _spread(conversion: Resharding, context: WorkerContext) -> Callable[[Tensor | None], Tensor | None]:
    """Brings a value that its holders have whole to those that are to hold it and do not."""
    have = conversion.before.holders
    new = [each for each in conversion.after.holders if each not in have]
    if not new or (context.rank != have[0] and context.rank not in new):
        return lambda tensor: tensor
    group, dtype = Group.of((have[0], *new), context.rank), DTYPES[conversion.dtype]

    def run(tensor: Tensor | None) -> Tensor:
        out = torch.empty(conversion.shape, dtype=dtype, device=context.device) if tensor is None else tensor
        context.transport.broadcast(out, group)
        context.transport.wait_sends()
        return out

    return run


def _changes(place: Placement, before: Layout, after: Layout, context: WorkerContext) -> list[LocalMove]:
    """Moves among the holders of `place` from one layout to another.

    One if one axis changes, else first all that changes is gathered, then cut.
    """
    if context.rank not in place.holders:
        return []
    seat = RankContext(place.mesh, context)
    changing = [axis for axis, size in seat.mesh.axes if size > 1 and before.state(axis) != after.state(axis)]
    if len(changing) == 1:
        return [move(seat, changing[0], before, after)]
    moves: list[LocalMove] = []
    at = before
    for axis in changing:
        whole = at.with_state(axis, REPLICATED)
        moves.append(move(seat, axis, at, whole))
        at = whole
    for axis in changing:
        there = at.with_state(axis, after.state(axis))
        moves.append(move(seat, axis, at, there))
        at = there
    return moves


def _apply(steps: list[LocalMove], tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    for step in steps:
        tensor = step(tensor)
    return tensor
