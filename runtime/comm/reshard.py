"""Resharding of a value on the workers: the local part of each collective, and conversions composed of them.

A move changes the state of a value on one axis. The state before and the state after determine the collective:

    partial -> replicated      all-reduce         replicated -> sharded    shard (a local slice)
    partial -> sharded         reduce-scatter     replicated -> partial    first (zeros on all ranks but one)
    sharded -> replicated      all-gather         sharded -> sharded       all-to-all
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moaic.ir.layout import FULLY_REPLICATED, PARTIAL, REPLICATED, Layout, Mesh, Split, is_uneven
from moaic.runtime.comm.transport import Group, SubAxis, Transport
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.placement import Placement
from moaic.runtime.protocol.tensor_parts import cut, padded, without_padding

Conversion = Callable[[Tensor | None], Tensor | None]
"""Maps a rank's part of a value before a resharding to that after it; None where the rank has no part."""

LocalMove = Callable[[Tensor], Tensor]
"""Maps a rank's local tensor before a move to that after it, which may share memory with it."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of a mesh, with its transport and its groups."""

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


def move(
    rank_context: RankContext,
    axis: str,
    shape: Sequence[int],
    before: Layout,
    after: Layout,
    *,
    in_place: bool = False,
) -> LocalMove:
    """The move of a value of this global shape from layout `before` to `after`, which differ on `axis` alone.

    With `in_place` the result may reuse the memory of the argument.
    """
    count = rank_context.mesh.size(axis)
    old, new = before.state(axis), after.state(axis)
    if count == 1 or old == new:
        return _same
    if old == PARTIAL:
        if new == REPLICATED:
            return _all_reduce(rank_context, axis, in_place)
        return _reduce_scatter(rank_context, axis, after)
    if old == REPLICATED:
        return _first(rank_context, axis, in_place) if new == PARTIAL else _shard(rank_context, axis, after)
    if new == REPLICATED:
        return _all_gather(rank_context, axis, shape, before)
    if new == PARTIAL:
        raise ValueError(f"no move makes a sharded value partial over {axis}")
    return _all_to_all(rank_context, axis, shape, before, after)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _all_reduce(rank_context: RankContext, axis: str, in_place: bool) -> LocalMove:
    group, transport = rank_context.group(axis), rank_context.transport

    def run(tensor: Tensor) -> Tensor:
        out = owned(tensor, in_place and tensor.is_contiguous())
        transport.all_reduce(out, group)
        return out

    return run


def _reduce_scatter(rank_context: RankContext, axis: str, after: Layout) -> LocalMove:
    group, sub_axis = rank_context.group(axis), sub_axis_of(after, axis, rank_context.mesh)
    dim, size = sub_axis.dim, group.size * sub_axis.stride
    return lambda tensor: rank_context.transport.reduce_scatter(padded(tensor, dim, size), group, sub_axis)


def _all_gather(rank_context: RankContext, axis: str, shape: Sequence[int], before: Layout) -> LocalMove:
    group, sub_axis = rank_context.group(axis), sub_axis_of(before, axis, rank_context.mesh)
    dim, size = sub_axis.dim, shape[sub_axis.dim]
    return lambda tensor: without_padding(rank_context.transport.all_gather(tensor, group, sub_axis), dim, size)


def _shard(rank_context: RankContext, axis: str, after: Layout) -> LocalMove:
    sub_axis = sub_axis_of(after, axis, rank_context.mesh)
    count, index = rank_context.mesh.size(axis), rank_context.index(axis)
    return lambda tensor: cut(tensor, *sub_axis, count, index)


def _first(rank_context: RankContext, axis: str, in_place: bool) -> LocalMove:
    return _same if rank_context.index(axis) == 0 else torch.zeros_like


def _all_to_all(rank_context: RankContext, axis: str, shape: Sequence[int], before: Layout, after: Layout) -> LocalMove:
    (old, give_stride), (new, _) = _split(before, axis, rank_context.mesh), _split(after, axis, rank_context.mesh)
    count = rank_context.mesh.size(axis)
    are_uneven = any(is_uneven(shape[split.dim], split.stride, count) for split in (old, new))
    if are_uneven or (old.dim == new.dim and not _are_apart(old, new, count)):
        gather, shard = _all_gather(rank_context, axis, shape, before), _shard(rank_context, axis, after)
        return lambda tensor: own(shard(gather(tensor)))
    group = rank_context.group(axis)
    # Within one dim, the local stride of the outer sub-axis is smaller by `count` while the inner one is sharded.
    inner = count if old.dim == new.dim and old.stride < new.stride else 1
    cut_stride = after.local_stride(new, rank_context.mesh) // inner
    inner = count if old.dim == new.dim and new.stride < old.stride else 1
    join_stride = give_stride // inner

    given, taken = SubAxis(new.dim, cut_stride), SubAxis(old.dim, join_stride)
    return lambda tensor: rank_context.transport.all_to_all(tensor, group, given, taken)


def sub_axis_of(layout: Layout, axis: str, mesh: Mesh) -> SubAxis:
    """The sub-axis of the local tensor along which `axis` splits it."""
    split, stride = _split(layout, axis, mesh)
    return SubAxis(split.dim, stride)


def _split(layout: Layout, axis: str, mesh: Mesh) -> tuple[Split, int]:
    """The split of `axis`, and its stride in the local tensor."""
    split = layout.split_of(axis)
    assert split is not None, f"{axis} splits nothing in {layout}"
    return split, layout.local_stride(split, mesh)


def _are_apart(one: Split, other: Split, count: int) -> bool:
    """Whether two sub-axes of one dim do not overlap: the larger stride is a multiple of the smaller extent."""
    low, high = sorted((one.stride, other.stride))
    return high % (low * count) == 0


def is_shared(tensor: Tensor) -> bool:
    """Whether another tensor uses the memory of `tensor`."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # pyright: ignore[reportPrivateUsage]


def own(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous, else a contiguous copy."""
    return tensor if tensor.is_contiguous() else own(tensor)


def owned(tensor: Tensor, free: bool) -> Tensor:
    """A tensor to write into: `tensor` itself if it is `free` and its memory is not shared, else a copy."""
    return tensor if free and not is_shared(tensor) else own(tensor)


def convert(conversion: Resharding, context: WorkerContext) -> Conversion:
    """The resharding on one worker: maps its part before, if it has one, to its part after, if it gets one."""
    before, after = conversion.before, conversion.after
    if before.mesh == after.mesh and before.layout.owner == after.layout.owner:
        steps = _changes(before, conversion.shape, before.layout, after.layout, context)
        return lambda tensor: _apply(steps, tensor)
    gather = _changes(before, conversion.shape, before.layout, FULLY_REPLICATED, context)
    spread = _spread(conversion, context)
    cutting = _changes(after, conversion.shape, FULLY_REPLICATED, after.layout, context)
    keeps = context.rank in after.holders

    def run(tensor: Tensor | None) -> Tensor | None:
        whole = spread(_apply(gather, tensor))
        return _apply(cutting, whole) if keeps else None

    return run


def gathered_axis(conversion: Resharding) -> str | None:
    """The axis over which a conversion gathers a value, if it does nothing else."""
    before, after = conversion.before, conversion.after
    if before.mesh != after.mesh or before.layout.owner != after.layout.owner:
        return None
    sizes = dict(before.mesh.axes)
    changing = [
        axis for axis, size in sizes.items() if size > 1 and before.layout.state(axis) != after.layout.state(axis)
    ]
    gathers = len(changing) == 1 and before.layout.split_of(changing[0]) is not None
    return changing[0] if gathers and after.layout.state(changing[0]) == REPLICATED else None


def _spread(conversion: Resharding, context: WorkerContext) -> Callable[[Tensor | None], Tensor | None]:
    """Broadcast a replicated value to the holders of the conversion's result that do not have it yet."""
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


def _changes(
    place: Placement, shape: Sequence[int], before: Layout, after: Layout, context: WorkerContext
) -> list[LocalMove]:
    """The moves among the holders of `place` from one layout to another.

    One move if one axis changes; else all changing axes are replicated first, and then sharded.
    """
    if context.rank not in place.holders:
        return []
    rank_context = RankContext(place.mesh, context)
    changing = [axis for axis, size in rank_context.mesh.axes if size > 1 and before.state(axis) != after.state(axis)]
    if len(changing) == 1:
        return [move(rank_context, changing[0], shape, before, after)]
    moves: list[LocalMove] = []
    at = before
    for axis in changing:
        whole = at.with_state(axis, REPLICATED)
        moves.append(move(rank_context, axis, shape, at, whole))
        at = whole
    for axis in changing:
        there = at.with_state(axis, after.state(axis))
        moves.append(move(rank_context, axis, shape, at, there))
        at = there
    return moves


def _apply(steps: list[LocalMove], tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    for step in steps:
        tensor = step(tensor)
    return tensor
