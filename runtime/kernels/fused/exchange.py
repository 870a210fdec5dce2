"""Packing of a tensor into contiguous parts along a sub-axis of a dim, as an all-to-all needs them, and unpacking.

The cut is that of `runtime/protocol/tensor_parts.py`: a dim of outer * count * stride elements has `count` parts, each
of runs of `stride` elements, which stay contiguous with the dims below. Each direction reads and writes the tensor
once, while plain PyTorch copies each part and then concatenates.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch
from moaic.runtime.protocol.tensor_parts import cut, join


def reference(x: Tensor, dim: int, stride: int, count: int) -> Tensor:
    """`pack` in plain PyTorch: the parts [count, ...]."""
    return torch.stack([cut(x, dim, stride, count, index) for index in range(count)])


def reference_join(parts: Tensor, dim: int, stride: int) -> Tensor:
    """`unpack` in plain PyTorch."""
    return join(list(parts), dim, stride)


def pack(x: Tensor, dim: int, stride: int, count: int, tile: Tile) -> Tensor:
    """The parts [count, ...] of x of any strides, contiguous."""
    size = x.shape[dim]
    if size % (count * stride):
        raise ValueError(f"a dim of {size} does not divide into {count} parts of stride {stride}")
    parts = x.new_empty((count, *x.shape[:dim], size // count, *x.shape[dim + 1 :]))
    _launch(x, parts, dim, stride, tile, into=True)
    return parts


def unpack(parts: Tensor, dim: int, stride: int, tile: Tile) -> Tensor:
    """The tensor that has these parts [count, ...]; `dim` is a dim of the tensor, not of `parts`."""
    count, *shape = parts.shape
    if shape[dim] % stride:
        raise ValueError(f"a dim of {shape[dim]} does not divide into runs of {stride}")
    shape[dim] *= count
    x = parts.new_empty(shape)
    _launch(x, parts.contiguous(), dim, stride, tile, into=False)
    return x


def _launch(x: Tensor, parts: Tensor, dim: int, stride: int, tile: Tile, *, into: bool) -> None:
    count, above, below = parts.shape[0], prod(x.shape[:dim]), prod(x.shape[dim + 1 :])
    outer, run = x.shape[dim] // (count * stride), stride * below
    flat = x.reshape(above, x.shape[dim], below)
    grid = (blocks(above * outer, tile.rows) * blocks(run, tile.columns), count)
    sizes = (*flat.stride(), above * outer, outer, stride, below)
    launch(_move, grid, tile, flat, parts, *sizes, INTO=into, ROWS=tile.rows, COLUMNS=tile.columns)


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """The Triton programs for elements of this type and a contiguous last dim."""
    types = {
        **dict.fromkeys(("x", "parts"), f"*{element}"),
        **dict.fromkeys(("x_above", "x_dim", "runs", "outer", "stride", "below"), "i32"),
    }
    tiles = {"x_below": 1, "ROWS": tile.rows, "COLUMNS": tile.columns}
    return tuple(TritonProgram(_move, types, {**tiles, "INTO": into}) for into in (True, False))


@triton.jit
def _move(
    x: tl.tensor,
    parts: tl.tensor,
    x_above: tl.tensor,
    x_dim: tl.tensor,
    x_below: tl.tensor,
    runs: tl.tensor,
    outer: tl.tensor,
    stride: tl.tensor,
    below: tl.tensor,
    INTO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A piece of some runs of one part."""
    length = stride * below
    pieces = tl.cdiv(length, COLUMNS)
    part = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < runs)[:, None] & (column < length)[None, :]
    start = row // outer * x_above + (row % outer * tl.num_programs(1) + part) * stride * x_dim
    within = (column // below).to(tl.int64) * x_dim + column % below * x_below
    one = x + start[:, None] + within[None, :]
    other = parts + ((part * runs + row) * length)[:, None] + column[None, :]
    if INTO:
        tl.store(other, tl.load(one, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(one, tl.load(other, mask=inside, other=0.0), mask=inside)
