"""Checkpoint files of workers: each worker writes and reads the boxes of a value that it holds.

A file holds ordinary tensors, saved by `torch.save` one after the other; each worker writes one file.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.disk import disk_errors_named
from moaic.runtime.protocol.boxes import Box, FileSource, Sizes


def write(path: str, items: Sequence[tuple[int, Sizes, Sizes]], table: Mapping[int, Tensor]) -> list[tuple[int, int]]:
    """Write boxes (buffer, local starts, sizes) to a file; return the offset and length of each in the file."""
    written: list[tuple[int, int]] = []
    with disk_errors_named(lambda: f"writing {path}"), Path(path).open("wb") as file:
        for buffer_id, local, sizes in items:
            begin = file.tell()
            box = _at(table[buffer_id], local, sizes).cpu()
            # torch.save writes whole storages: a view would be saved with all of its storage.
            is_all = box.is_contiguous() and box.untyped_storage().nbytes() == box.nbytes
            torch.save(box if is_all else box.clone(memory_format=torch.contiguous_format), file)
            written.append((begin, file.tell() - begin))
        file.flush()
        os.fsync(file.fileno())
    return written


def read(shape: Sizes, dtype: str, held: Sequence[Box], sources: Sequence[FileSource]) -> Tensor:
    """A worker's part of a value, on the host, read from the sources that overlap it."""
    local = torch.empty(shape, dtype=DTYPES[dtype])
    for source in sources:
        overlaps = [(box, overlap) for box in held if (overlap := _overlap(box, source)) is not None]
        if not overlaps:
            continue
        saved = _saved(source)
        for box, (starts, sizes) in overlaps:
            inside = tuple(i + s - o for i, s, o in zip(source.inside, starts, source.starts, strict=True))
            here = tuple(i + s - o for i, s, o in zip(box.local, starts, box.starts, strict=True))
            _at(local, here, sizes).copy_(_at(saved, inside, sizes))
    return local


def _overlap(box: Box, source: FileSource) -> tuple[Sizes, Sizes] | None:
    """The overlap of a box and a source: its starts in the global tensor and its sizes; None if there is none."""
    pairs = list(zip(box.starts, box.sizes, source.starts, source.sizes, strict=True))
    starts = tuple(max(one, other) for one, _, other, _ in pairs)
    ends = tuple(min(one + size, other + length) for one, size, other, length in pairs)
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _saved(source: FileSource) -> Tensor:
    with Path(source.path).open("rb") as file:
        file.seek(source.offset)
        return cast("Tensor", torch.load(io.BytesIO(file.read(source.length)), map_location="cpu", weights_only=True))


def _at(tensor: Tensor, starts: Sizes, sizes: Sizes) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor
