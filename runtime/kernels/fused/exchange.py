"""A tensor cut along a digit of a dim into parts that lie one after another, for an all-to-all, and put together again.

The digit is that of `runtime/protocol/tensor_parts.py`: a dim of outer * count * stride elements falls into `count`
parts. In a part, what stood side by side still does: runs of stride elements of the dim, with all that lies below it.
Both ways take one pass, where cutting takes one for each part and putting together another.
"""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.launch import Tile, TritonProgram, blocks, launch
from moaic.runtime.protocol.tensor_parts import cut, join


def reference(x: Tensor, dim: int, stride: int, count: int) -> Tensor:
    """Cutting in plain PyTorch: [count, ...]."""
    return torch.stack([cut(x, dim, stride, count, index) for index in range(count)])


def reference_join(parts: Tensor, dim: int, stride: int) -> Tensor:
    """Putting together in plain PyTorch."""
    return join(list(parts), dim, stride)


def pack(x: Tensor, dim: int, stride: int, count: int, tile: Tile) -> Tensor:
    """The parts [count, ...] of x of any strides, one after another."""
    size = x.shape[dim]
    if size % (count * stride):
        raise ValueError(f"a dim of {size} does not fall into {count} parts by steps of {stride}")
    parts = x.new_empty((count, *x.shape[:dim], size // count, *x.shape[dim + 1 :]))
    _launch(x, parts, dim, stride, tile, into=True)
    return parts


def unpack(parts: Tensor, dim: int, stride: int, tile: Tile) -> Tensor:
    """The tensor whose parts [count, ...] are; `dim` is a dim of it, not of `parts`."""
    count, *shape = parts.shape
    if shape[dim] % stride:
        raise ValueError(f"a dim of {shape[dim]} does not fall into steps of {stride}")
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
    """What is compiled for elements of this type, where the last dim lies whole in memory."""
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
