"""Layouts: the state of one value on each axis of a mesh.

On every axis a value is replicated, sharded along one dim, or partial: the sum of one term per rank. An axis of n ranks
that shards a dim of size N takes one factor of it: N = outer * n * stride, and index i is on rank (i // stride) % n.
`stride = N / n` is the contiguous chunk. A smaller stride results from merging dims (`(b s)` with s split), or if
another axis shards the outer part of the dim.

A dim that n does not divide may be sharded unevenly, by one axis alone: in chunks of N / n rounded up, as far as they
go. All ranks hold as much, the last ones padding. Parameters and what belongs to them are; nothing reads the padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final, NamedTuple

from moaic.ir.errors import Diagnostic


@dataclass(frozen=True)
class Mesh:
    """Named axes and their sizes, outermost first; rank r has mixed-radix coordinates over them."""

    axes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Ranks along `axis`; an axis that the mesh does not have is one rank wide."""
        return self.sizes.get(axis, 1)

    def with_axis(self, name: str, size: int, *, outermost: bool = False) -> Mesh:
        """The mesh with one more axis, innermost unless said; raises Diagnostic where it has one of this name."""
        if name in self.sizes:
            raise Diagnostic(f"there is an axis `{name}` already: nothing is split over it twice")
        return Mesh(((name, size), *self.axes) if outermost else (*self.axes, (name, size)))

    def coordinates(self, rank: int) -> dict[str, int]:
        coordinates: dict[str, int] = {}
        for axis, size in reversed(self.axes):
            coordinates[axis] = rank % size
            rank //= size
        return coordinates

    def rank(self, coordinates: dict[str, int]) -> int:
        rank = 0
        for axis, size in self.axes:
            rank = rank * size + coordinates.get(axis, 0)
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axis` alone, in order of their coordinate."""
        at = self.coordinates(rank)
        return tuple(self.rank({**at, axis: i}) for i in range(self.size(axis)))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{axis}={size}" for axis, size in self.axes) + "]"


@dataclass(frozen=True, slots=True)
class Replicated:
    """State of a value on an axis: every rank holds all of it."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True, slots=True)
class Partial:
    """State of a value on an axis: it is the sum of one term per rank."""

    def __str__(self) -> str:
        return "partial"


class Sharded(NamedTuple):
    """State of a value on an axis: index i of `dim` is on rank (i // stride) % n. A tuple, for a fast hash."""

    dim: int
    stride: int

    def __str__(self) -> str:
        return f"sharded {self.dim}:{self.stride}"


@dataclass(frozen=True, slots=True)
class Deferred:
    """State of a value on a loop axis, only during partitioning: replicated, but finished after the last micro-batch.

    No layout holds it: once the loop is unrolled such a value is replicated.
    """


State = Replicated | Partial | Sharded | Deferred

REPLICATED: Final = Replicated()
PARTIAL: Final = Partial()
DEFERRED: Final = Deferred()


def splits_dim(state: State, dim: int) -> bool:
    return isinstance(state, Sharded) and state.dim == dim


@dataclass(frozen=True, slots=True)
class Split:
    """One axis along one dim: index i of the dim is on rank (i // stride) % size(axis)."""

    axis: str
    dim: int
    stride: int


Owner = tuple[tuple[str, int], ...]
"""For some axes, in order of their names, the one rank that alone holds a value."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The splits of a value, ordered by (dim, stride descending), and the axes over which it is partial.

    `owner` names, for some axes, the one rank that alone holds the value: on `pp` the stage to which it belongs.
    """

    splits: tuple[Split, ...] = ()
    partial: tuple[str, ...] = ()
    owner: Owner = ()

    def split_of(self, axis: str) -> Split | None:
        for split in self.splits:
            if split.axis == axis:
                return split
        return None

    def state(self, axis: str) -> State:
        """State of the value on `axis`: REPLICATED, PARTIAL or Sharded."""
        split = self.split_of(axis)
        if split is not None:
            return Sharded(split.dim, split.stride)
        return PARTIAL if axis in self.partial else REPLICATED

    def without(self, axis: str) -> Layout:
        return Layout(
            tuple(split for split in self.splits if split.axis != axis),
            tuple(other for other in self.partial if other != axis),
            tuple(owner for owner in self.owner if owner[0] != axis),
        )

    def owner_on(self, axis: str) -> int | None:
        """The only rank along `axis` that holds the value; None where all do."""
        for other, rank in self.owner:
            if other == axis:
                return rank
        return None

    def with_owner(self, axis: str, rank: int | None) -> Layout:
        """This layout, held by one rank of `axis` alone, or by all."""
        rest = self.without(axis)
        owner = () if rank is None else ((axis, rank),)
        return Layout(rest.splits, rest.partial, tuple(sorted((*rest.owner, *owner))))

    def holds(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at these coordinates holds a part of the value."""
        return all(coordinates.get(axis, 0) == rank for axis, rank in self.owner)

    def with_state(self, axis: str, state: State) -> Layout:
        """This layout with `axis` set to `state`."""
        rest = self.without(axis)
        if state == PARTIAL:
            return Layout(rest.splits, tuple(sorted({*rest.partial, axis})), rest.owner)
        if not isinstance(state, Sharded):
            return rest
        splits = sorted((*rest.splits, Split(axis, state.dim, state.stride)), key=lambda s: (s.dim, -s.stride, s.axis))
        return Layout(tuple(splits), rest.partial, rest.owner)

    def on_dim(self, dim: int) -> tuple[Split, ...]:
        return tuple(split for split in self.splits if split.dim == dim)

    def local_shape(self, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
        """Shape of the part of one rank, with the padding of uneven shards."""
        local = list(shape)
        for split in self.splits:
            local[split.dim] = divided(local[split.dim], mesh.size(split.axis))
        return tuple(local)

    def local_stride(self, split: Split, mesh: Mesh) -> int:
        """Stride of `split` inside the part that is left when every other axis has taken its own."""
        inner = prod(mesh.size(o.axis) for o in self.on_dim(split.dim) if o.stride < split.stride)
        return split.stride // inner


def divided(size: int, ranks: int) -> int:
    """The size of a dim on one of the ranks that shard it."""
    return -(-size // ranks)


def is_uneven(size: int, stride: int, ranks: int) -> bool:
    """Whether a split cuts a dim into chunks of which the last ones are shorter, or empty."""
    return size > ranks and size % ranks != 0 and stride == divided(size, ranks)


def elements_of(size: int, stride: int, index: int) -> int:
    """How many elements of an uneven dim are in the chunk of this index."""
    return min(stride, max(0, size - index * stride))


FULLY_REPLICATED = Layout()
"""Every rank of every axis holds all of the value."""
