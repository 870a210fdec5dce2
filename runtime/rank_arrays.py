"""Layouts and collectives as plain array operations on lists with the parts of all ranks: what the interpreter runs.

A sub-axis of a dim is `size` ranks at `stride`: index i of the dim is on rank (i // stride) % size. The implementation
shares no code with the workers', so that comparing both proves something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from moaic.ir.graph import Op
from moaic.ir.layout import Mesh, Split
from moaic.ir.op_names import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FIRST,
    JOIN,
    PART,
    REDUCE_SCATTER,
    SHARD,
)
from moaic.ir.types import TensorType
from moaic.runtime.dtypes import DTYPES

PerRank = list[Tensor]
"""The parts of a value, by rank."""

ABSENT: Final = torch.empty(0)
"""The part of a rank that does not hold the value."""

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest allowed difference between replicas of a value, relative to its largest element."""


def take_part(tensor: Tensor, dim: int, stride: int, size: int, at: int) -> Tensor:
    """Part `at` along a sub-axis: the dim as (outer, size, stride), with index `at` of the middle one.

    A dim that is too short for that is padded with zeros.
    """
    missing = -tensor.shape[dim] % (size * stride)
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])], dim)
    before, count, after = tensor.shape[:dim], tensor.shape[dim], tensor.shape[dim + 1 :]
    seen = tensor.reshape(*before, count // (size * stride), size, stride, *after)
    return seen.select(dim + 1, at).reshape(*before, count // size, *after)


def join_parts(parts: Sequence[Tensor], dim: int, stride: int) -> Tensor:
    """The inverse of `take_part`: the tensor from all its parts, in order, with its padding."""
    before, count, after = parts[0].shape[:dim], parts[0].shape[dim], parts[0].shape[dim + 1 :]
    seen = [part.reshape(*before, count // stride, stride, *after) for part in parts]
    return torch.stack(seen, dim + 1).reshape(*before, count * len(parts), *after)


def scatter(tensor: Tensor, type_: TensorType, mesh: Mesh) -> PerRank:
    """The parts of a global tensor. If it is partial, the first rank gets the value and the others zeros."""
    parts: PerRank = []
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        if not type_.layout.holds(at):
            parts.append(ABSENT)
            continue
        part = tensor
        for split in sorted(type_.layout.splits, key=lambda split: -split.stride):
            part = take_part(part, split.dim, split.stride, mesh.size(split.axis), at[split.axis])
        keeps = all(at[axis] == 0 for axis in type_.layout.partial)
        parts.append(part.contiguous() if keeps else torch.zeros_like(part))
    return parts


def gather(parts: PerRank, type_: TensorType, mesh: Mesh) -> Tensor:
    """The global tensor from the parts of all ranks, partial values summed; raises if replicas differ."""
    without_owner = {axis: 0 for axis, _ in type_.layout.owner}
    places = {rank: mesh.coordinates(rank) for rank in range(mesh.ranks)}
    held = {mesh.rank({**at, **without_owner}): parts[rank] for rank, at in places.items() if type_.layout.holds(at)}
    for axis in type_.layout.partial:
        held = _folded(held, mesh, axis, lambda members: torch.stack(members).sum(0).to(members[0].dtype))
    for split in sorted(type_.layout.splits, key=lambda split: split.stride):
        held = _folded(held, mesh, split.axis, _joiner(split, type_.shape[split.dim]))
    for axis, _ in mesh.axes:
        held = _folded(held, mesh, axis, _agreed)
    return held[0]


def _folded(
    held: Mapping[int, Tensor], mesh: Mesh, axis: str, fold: Callable[[list[Tensor]], Tensor]
) -> dict[int, Tensor]:
    """One value per group along `axis`, kept by the group's first rank."""
    firsts = [rank for rank in held if mesh.coordinates(rank)[axis] == 0]
    return {rank: fold([held[member] for member in mesh.group(rank, axis) if member in held]) for rank in firsts}


def _joiner(split: Split, size: int) -> Callable[[list[Tensor]], Tensor]:
    # Sub-axes of smaller stride are joined already and those of larger stride not yet, so the stride is the global one.
    return lambda members: without_padding(join_parts(members, split.dim, split.stride), split.dim, size)


def without_padding(tensor: Tensor, dim: int, size: int) -> Tensor:
    return tensor if tensor.shape[dim] <= size else tensor.narrow(dim, 0, size)


def _agreed(members: list[Tensor]) -> Tensor:
    first = members[0]
    for index, other in enumerate(members[1:], 1):
        if not _same(first, other):
            raise AssertionError(f"the replicas of ranks 0 and {index} of an axis differ")
    return first


def _same(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one.abs().max().item() if one.numel() and bool(one.isfinite().all()) else 1.0
    return torch.allclose(one, other, rtol=0, atol=TOLERANCES[one.dtype] * max(largest, 1e-30), equal_nan=True)


Collective = Callable[[list[Tensor], TensorType, TensorType, str, Mesh], list[Tensor]]


def _summed(parts: list[Tensor]) -> Tensor:
    """By the tree of the workers: the first half, of a power of two parts, and the rest."""
    if len(parts) == 1:
        return parts[0]
    half = 1
    while 2 * half < len(parts):
        half *= 2
    return _summed(parts[:half]) + _summed(parts[half:])


def split_over(tensor: Tensor, type_: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    split = type_.layout.split_of(axis)
    assert split is not None
    stride, size = type_.layout.local_stride(split, mesh), mesh.size(axis)
    return [take_part(tensor, split.dim, stride, size, at) for at in range(size)]


def joined_over(parts: list[Tensor], type_: TensorType, axis: str, mesh: Mesh) -> Tensor:
    split = type_.layout.split_of(axis)
    assert split is not None
    whole = join_parts(parts, split.dim, type_.layout.local_stride(split, mesh))
    return without_padding(whole, split.dim, type_.shape[split.dim])


def _all_reduce(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [_summed(parts)] * len(parts)


def _reduce_scatter(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return split_over(_summed(parts), target, axis, mesh)


def _all_gather(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [joined_over(parts, source, axis, mesh)] * len(parts)


def _all_to_all(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return split_over(joined_over(parts, source, axis, mesh), target, axis, mesh)


def _shard(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [split_over(part, target, axis, mesh)[at] for at, part in enumerate(parts)]


def _first(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [parts[0], *(torch.zeros_like(part) for part in parts[1:])]


COLLECTIVES: Final[Mapping[str, Collective]] = {
    ALL_REDUCE: _all_reduce,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_GATHER: _all_gather,
    ALL_TO_ALL: _all_to_all,
    SHARD: _shard,
    FIRST: _first,
}
"""Each collective: maps the parts of a group along an axis, in order of their coordinate, to those after it."""


def _ints(op: Op, *names: str) -> list[int]:
    values = [op.attrs[name] for name in names]
    return [value for value in values if isinstance(value, int)]


def _part(op: Op, operands: list[Tensor], mesh: Mesh) -> Tensor:
    dim, stride, count, index = _ints(op, "dim", "stride", "count", "index")
    return take_part(operands[0], dim, stride, count, index)


def _join(op: Op, operands: list[Tensor], mesh: Mesh) -> Tensor:
    dim, stride = _ints(op, "dim", "stride")
    return join_parts(operands, dim, stride)


def _accumulate(op: Op, operands: list[Tensor], mesh: Mesh) -> Tensor:
    """The sum of all operands, in the wider of their types; zeros if there are none."""
    type_ = op.results[0].type
    begun = sum(operands[1:], operands[0]) if operands else torch.zeros(type_.local_shape(mesh))
    return begun.to(DTYPES[type_.dtype])


LOCAL_INSTRUCTIONS: Final[Mapping[str, Callable[[Op, list[Tensor], Mesh], Tensor]]] = {
    PART: _part,
    JOIN: _join,
    ACCUMULATE: _accumulate,
}
"""Instructions of one rank on its own parts, for loop axes."""
