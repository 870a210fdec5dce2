"""Packing of tensors into one flat bucket for a collective, and unpacking: one launch, with cast and scale.

The bucket's type may be narrower than the tensors' (gradients reduced in bfloat16) or wider; the scale makes a sum over
ranks a mean. Where the tensors lie is a table on the device, made once for as long as they stay there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, launch


class Chunks(NamedTuple):
    """Pieces of no more than a tile, one for each program."""

    table: Tensor
    """i64[chunks, 3]: the address of a piece, where it lies in the bucket, and how many elements it has."""
    like: Tensor
    """One of the tensors, for their type."""
    elements: int
    """Of the bucket."""


def chunks_of(tensors: Sequence[Tensor], tile: Tile) -> Chunks:
    """Of tensors of one type on one device, each whole in memory, in their order in the bucket."""
    first, *_ = tensors
    if any(each.dtype != first.dtype or each.device != first.device for each in tensors):
        raise ValueError("the tensors of a bucket are of one type, on one device")
    if not all(each.is_contiguous() for each in tensors):
        raise ValueError("a tensor of a bucket does not lie whole in memory")
    pieces: list[tuple[int, int, int]] = []
    start = 0
    for each in tensors:
        for at in range(0, each.numel(), tile.columns):
            address = each.data_ptr() + at * each.itemsize
            pieces.append((address, start + at, min(tile.columns, each.numel() - at)))
        start += each.numel()
    table = torch.tensor(pieces, dtype=torch.int64, device=first.device).view(-1, 3)
    return Chunks(table, first, start)


def reference(tensors: Sequence[Tensor], bucket: Tensor, scale: Tensor) -> None:
    """Packing in plain PyTorch; unpacking is the same the other way round."""
    bucket.copy_(torch.cat([each.flatten() for each in tensors]) * scale)


def pack(chunks: Chunks, bucket: Tensor, scale: Tensor, tile: Tile) -> None:
    """Writes the tensors times `scale` f32[], which the device has, into the bucket [count] of any type."""
    _launch(chunks, bucket, scale, tile, into=True)


def unpack(chunks: Chunks, bucket: Tensor, scale: Tensor, tile: Tile) -> None:
    """Writes what is in the bucket, times `scale`, into the tensors."""
    _launch(chunks, bucket, scale, tile, into=False)


def _launch(chunks: Chunks, bucket: Tensor, scale: Tensor, tile: Tile, *, into: bool) -> None:
    if bucket.shape != (chunks.elements,) or not bucket.is_contiguous():
        raise ValueError(f"the bucket is not {chunks.elements} elements side by side")
    grid = (len(chunks.table),)
    launch(_move, grid, tile, chunks.table, chunks.like, bucket, scale, INTO=into, COLUMNS=tile.columns)


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """What is compiled for tensors in float32 and a bucket of this type."""
    types = {"table": "*i64", "like": "*fp32", "bucket": f"*{element}", "scale": "*fp32"}
    return tuple(TritonProgram(_move, types, {"INTO": into, "COLUMNS": tile.columns}) for into in (True, False))


@triton.jit
def _move(
    table: tl.tensor,
    like: tl.tensor,
    bucket: tl.tensor,
    scale: tl.tensor,
    INTO: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One piece."""
    entry = table + tl.program_id(0).to(tl.int64) * 3
    at = tl.arange(0, COLUMNS)
    inside = at < tl.load(entry + 2)
    piece = tl.load(entry).to(like.dtype) + at
    place = bucket + tl.load(entry + 1) + at
    if INTO:
        tl.store(place, tl.load(piece, mask=inside, other=0.0).to(tl.float32) * tl.load(scale), mask=inside)
    else:
        tl.store(piece, tl.load(place, mask=inside, other=0.0).to(tl.float32) * tl.load(scale), mask=inside)
