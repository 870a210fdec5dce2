"""Values between workers and files: each worker writes and reads the boxes of a value that it holds.

What is written are ordinary tensors, saved by torch one after the other in one file per worker.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moaic.ir.layout import Split
from moaic.runtime.placement import Placement, sharing
from moaic.runtime.schema import DTYPES

Sizes = tuple[int, ...]


class Box(NamedTuple):
    """A contiguous range of every dim: where it begins in a worker's part, where in the whole, and how long it is."""

    local: Sizes
    starts: Sizes
    sizes: Sizes


class Part(NamedTuple):
    """A part of a value: the ranks that hold it, and the boxes that it is made of."""

    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]


class Source(NamedTuple):
    """A box of a saved tensor: the file and the bytes of the tensor, where the box begins in it and in the whole."""

    path: str
    offset: int
    length: int
    inside: Sizes
    starts: Sizes
    sizes: Sizes


@cache
def parts(shape: Sizes, place: Placement) -> tuple[Part, ...]:
    """The different parts of a value that lies as `place` says."""
    return tuple(Part(ranks, boxes(shape, place, ranks[0])) for ranks in sharing(place))


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


def write(path: str, items: Sequence[tuple[int, Sizes, Sizes]], table: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Writes boxes (buffer, where it begins here, its sizes) to a file; where in the file, and how long each is."""
    written: list[tuple[int, int]] = []
    with Path(path).open("wb") as file:
        for buffer_id, local, sizes in items:
            begin = file.tell()
            box = _at(table[buffer_id], local, sizes).cpu()
            # torch saves storages: a part of one would be saved with all of it.
            is_all = box.is_contiguous() and box.untyped_storage().nbytes() == box.nbytes
            torch.save(box if is_all else box.clone(memory_format=torch.contiguous_format), file)
            written.append((begin, file.tell() - begin))
        file.flush()
        os.fsync(file.fileno())
    return written


def read(shape: Sizes, dtype: str, held: Sequence[Box], sources: Sequence[Source]) -> Tensor:
    """A worker's part of a value, on the host, read from those sources that it needs."""
    local = torch.empty(shape, dtype=DTYPES[dtype])
    for source in sources:
        found = [(box, common) for box in held if (common := _common(box, source)) is not None]
        if not found:
            continue
        saved = _saved(source)
        for box, (starts, sizes) in found:
            inside = tuple(i + s - o for i, s, o in zip(source.inside, starts, source.starts, strict=True))
            here = tuple(i + s - o for i, s, o in zip(box.local, starts, box.starts, strict=True))
            _at(local, here, sizes).copy_(_at(saved, inside, sizes))
    return local


def _common(box: Box, source: Source) -> tuple[Sizes, Sizes] | None:
    """Where the range begins, in the whole, that a box and a source share, and its sizes."""
    pairs = list(zip(box.starts, box.sizes, source.starts, source.sizes, strict=True))
    starts = tuple(max(one, other) for one, _, other, _ in pairs)
    ends = tuple(min(one + size, other + length) for one, size, other, length in pairs)
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _saved(source: Source) -> Tensor:
    with Path(source.path).open("rb") as file:
        file.seek(source.offset)
        return cast("Tensor", torch.load(io.BytesIO(file.read(source.length)), map_location="cpu", weights_only=True))


def _at(tensor: Tensor, starts: Sizes, sizes: Sizes) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
