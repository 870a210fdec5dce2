"""The placement of a buffer: a layout over a mesh of the first workers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moaic.ir.layout import FULLY_REPLICATED, Layout, Mesh, Split

EVERYWHERE_AXIS = "w"
"""The axis of all workers, for buffers without a placement by a plan."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A layout over a mesh of k ranks, which are workers 0 to k-1. The default is worker 0 alone."""

    mesh: Mesh = Mesh()
    layout: Layout = FULLY_REPLICATED

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the mesh holds a replica."""
        return self.is_uncut and len(holders(self)) == self.mesh.ranks

    @property
    def is_uncut(self) -> bool:
        """Whether the value is neither sharded nor partial; it may have an owner."""
        return not self.layout.partial and all(self.mesh.size(split.axis) == 1 for split in self.layout.splits)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold a part of the value."""
        return holders(self)

    def with_splits(self, splits: tuple[Split, ...]) -> Placement:
        """The placement on the same ranks with other splits."""
        return Placement(self.mesh, Layout(splits, owner=self.layout.owner))

    def whole(self) -> Placement:
        """The replicated placement on the same ranks."""
        return self.with_splits(())


HeldPart = tuple[tuple[int, int, int, int], ...]
"""The part of a value that a rank holds: (dim, stride, count, index) of each sub-axis that is sharded."""


def everywhere(workers: int) -> Placement:
    """The placement replicated on the first `workers` workers."""
    return Placement(Mesh(((EVERYWHERE_AXIS, workers),)) if workers > 1 else Mesh())


def alone(rank: int, workers: int) -> Placement:
    """The placement of a whole value on one of some workers."""
    if workers == 1:
        return everywhere(1)
    return Placement(Mesh(((EVERYWHERE_AXIS, workers),)), Layout(owner=((EVERYWHERE_AXIS, rank),)))


def spread(shape: tuple[int, ...], workers: int) -> Placement:
    """The placement of a value that no plan has placed: sharded along its longest divisible dim, else replicated."""
    dims = [dim for dim, size in enumerate(shape) if size and size % workers == 0]
    there = everywhere(workers)
    if workers == 1 or not dims:
        return there
    longest = max(dims, key=lambda dim: shape[dim])
    return there.with_splits((Split(EVERYWHERE_AXIS, longest, shape[longest] // workers),))


@cache
def holders(place: Placement) -> tuple[int, ...]:
    """The ranks that hold a part, in order."""
    mesh = place.mesh
    return tuple(rank for rank in range(mesh.ranks) if place.layout.holds(mesh.coordinates(rank)))


@cache
def tiles(place: Placement) -> tuple[HeldPart | None, ...]:
    """The part of each rank, or None, up to the last rank that holds one. Partial values count as replicated."""
    mesh = place.mesh

    def tile(rank: int) -> HeldPart | None:
        at = mesh.coordinates(rank)
        if not place.layout.holds(at):
            return None
        splits = [split for split in place.layout.splits if mesh.size(split.axis) > 1]
        return tuple((split.dim, split.stride, mesh.size(split.axis), at[split.axis]) for split in splits)

    return tuple(tile(rank) for rank in range(holders(place)[-1] + 1))


@cache
def sharing(place: Placement) -> tuple[tuple[int, ...], ...]:
    """For each part, the ranks that hold it, in order."""
    groups: dict[HeldPart, list[int]] = {}
    for rank, tile in enumerate(tiles(place)):
        if tile is not None:
            groups.setdefault(tile, []).append(rank)
    return tuple(map(tuple, groups.values()))


@cache
def owners(place: Placement) -> tuple[int, ...]:
    """For each part, the first rank that holds it."""
    return tuple(group[0] for group in sharing(place))


@cache
def alike(one: Placement, other: Placement) -> bool:
    """Whether the same workers hold the same parts, even if the meshes have other axes."""
    if one.layout.partial or other.layout.partial:
        return one == other
    return tiles(one) == tiles(other)
