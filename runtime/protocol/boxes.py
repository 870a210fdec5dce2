"""The boxes of a value that each worker holds, which checkpoints store: contiguous ranges of every dim."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from moaic.ir.layout import Split
from moaic.runtime.protocol.placement import Placement, sharing

Sizes = tuple[int, ...]


class Box(NamedTuple):
    """A contiguous range of every dim: its start in the worker's part, its start in the global tensor, its size."""

    local: Sizes
    starts: Sizes
    sizes: Sizes


class Shard(NamedTuple):
    """A part of a value: the ranks that hold it, and its boxes."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]


class FileSource(NamedTuple):
    """A box of a saved tensor: file, bytes of the tensor, the start of the box in that tensor and in the global one."""

    path: str
    offset: int
    length: int
    inside: Sizes
    starts: Sizes
    sizes: Sizes


@cache
def parts(shape: Sizes, place: Placement) -> tuple[Shard, ...]:
    """The distinct parts of a value with this placement."""
    return tuple(Shard(ranks, boxes(shape, place, ranks[0])) for ranks in sharing(place))


@cache
def boxes(shape: Sizes, place: Placement, rank: int) -> tuple[Box, ...]:
    """The boxes that `rank` holds."""
    at = place.mesh.coordinates(rank)
    runs = [
        list(_runs(size, [(split, place.mesh.size(split.axis), at[split.axis]) for split in place.layout.on_dim(dim)]))
        for dim, size in enumerate(shape)
    ]
    return tuple(_box(combination) for combination in product(*runs))


def _box(runs: Sequence[tuple[int, int, int]]) -> Box:
    return Box(tuple(run[0] for run in runs), tuple(run[1] for run in runs), tuple(run[2] for run in runs))


def _runs(size: int, splits: Sequence[tuple[Split, int, int]]) -> Iterator[tuple[int, int, int]]:
    """The contiguous ranges of a dim on one rank: local start, global start, length; a split has its size and index."""
    ranges = [(0, size)]
    for split, count, index in splits:
        step, first = split.stride * count, split.stride * index
        ranges = [
            (max(low, start), min(high, start + split.stride))
            for low, high in ranges
            for start in range(low // step * step + first, high, step)
            if max(low, start) < min(high, start + split.stride)
        ]
    here = 0
    for low, high in ranges:
        yield here, low, high - low
        here += high - low
