"""The boxes of a value that each worker holds: contiguous ranges of every dim, for files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from moaic.ir.layout import Split
from moaic.runtime.protocol.placement import Placement, sharing

Sizes = tuple[int, ...]


class Box(NamedTuple):
    """A contiguous range of every dim: where it begins in a worker's part, where in the whole, and how long it is."""

    local: Sizes
    starts: Sizes
    sizes: Sizes


class Shard(NamedTuple):
    """A part of a value: the ranks that hold it, and the boxes that it is made of."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]


class FileSource(NamedTuple):
    """A box of a saved tensor: the file and the bytes of the tensor, where the box begins in it and in the whole."""

    path: str
    offset: int
    length: int
    inside: Sizes
    starts: Sizes
    sizes: Sizes


@cache
def parts(shape: Sizes, place: Placement) -> tuple[Shard, ...]:
    """The different parts of a value that lies as `place` says."""
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


def _runs(size: int, digits: Sequence[tuple[Split, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Ranges of a dim with these digits: where each begins here and in the whole, and its length."""
    ranges = [(0, size)]
    for split, count, index in digits:
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
