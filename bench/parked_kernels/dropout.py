"""Dropout whose mask depends on the key and on the global index of an element, not on the plan.

The numbers are those of the IR's `moai.rand`, bit by bit. The gradient of dropout is dropout of the gradient, so no
mask is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch, rows_of
from moaic.runtime.rng import MULTIPLIERS, WORD, global_index

_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in MULTIPLIERS)


class Place(NamedTuple):
    """Where a rank's part lies: an element's index in the whole tensor is its row's number plus its column's."""

    rows: Tensor
    columns: Tensor
    large: bool
    """Whether indices need more than 32 bits."""


def place_of(
    shape: Sequence[int],
    global_shape: Sequence[int],
    splits: Sequence[Sequence[int]],
    coordinates: Sequence[Tensor],
    device: torch.device,
) -> Place:
    """Of a part of `shape`, at least one dim, cut from `global_shape` as `moai.rand` has it in its attributes."""
    leading, last = tuple(shape[:-1]), shape[-1]
    rows = global_index((*leading, 1), global_shape, splits, coordinates, device)
    columns = global_index((*(1 for _ in leading), last), global_shape, splits, coordinates, device)
    corner = global_index(tuple(1 for _ in shape), global_shape, splits, coordinates, device)
    return Place(rows.reshape(-1), (columns - corner).reshape(-1), prod(global_shape) > WORD)


def reference(x: Tensor, uniform: Tensor, p: float) -> Tensor:
    """In plain PyTorch, from the numbers of `moai.rand`."""
    return x * (uniform > p) * _weight(p)


def forward(x: Tensor, key: Tensor, place: Place, p: float, tile: Tile) -> Tensor:
    """Of x[..., D] with the key i64[2]; of its gradient too."""
    flat = rows_of(x)
    out = flat.new_empty(flat.shape)
    grid = (flat.shape[0], blocks(flat.shape[1], tile.columns))
    operands = (flat, key.contiguous(), place.rows, place.columns, out, flat.stride(0), flat.shape[1])
    launch(_dropout, grid, tile, *operands, p, _weight(p), LARGE=place.large, COLUMNS=tile.columns)
    return out.view(x.shape)


def numbers(key: Tensor, place: Place, tile: Tile) -> Tensor:
    """The numbers themselves, f32[rows, columns] in [0, 1)."""
    rows, columns = len(place.rows), len(place.columns)
    out = torch.empty(rows, columns, dtype=torch.float32, device=key.device)
    operands = (key.contiguous(), place.rows, place.columns, out, columns)
    grid = (rows, blocks(columns, tile.columns))
    launch(_numbers, grid, tile, *operands, LARGE=place.large, COLUMNS=tile.columns)
    return out


def _weight(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """What is compiled for elements of this type."""
    places = dict.fromkeys(("key", "rows", "columns"), "*i64")
    types = {
        **dict.fromkeys(("x", "out"), f"*{element}"),
        **places,
        **dict.fromkeys(("x_row", "width"), "i32"),
        **dict.fromkeys(("p", "weight"), "fp32"),
    }
    alone = {**places, "out": "*fp32", "width": "i32"}
    return tuple(
        TritonProgram(function, of, {"LARGE": large, "COLUMNS": tile.columns})
        for large in (False, True)
        for function, of in ((_dropout, types), (_numbers, alone))
    )


@triton.jit
def _dropout(
    x: tl.tensor,
    key: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    width: tl.tensor,
    p: tl.tensor,
    weight: tl.tensor,
    LARGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    uniform = _uniform(key, rows + row, columns + at, inside, LARGE)
    kept = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    kept = tl.where(uniform > p, kept, kept * 0.0) * weight
    tl.store(out + row * width + at, kept, mask=inside)


@triton.jit
def _numbers(
    key: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    LARGE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    tl.store(out + row * width + at, _uniform(key, rows + row, columns + at, inside, LARGE), mask=inside)


@triton.jit
def _uniform(key: tl.tensor, row: tl.tensor, column: tl.tensor, inside: tl.tensor, LARGE: tl.constexpr) -> tl.tensor:
    """`moai.rand` at the sum of what row and column point to."""
    index = tl.load(row) + tl.load(column, mask=inside, other=0)
    word = _mix(index.to(tl.uint32) + tl.load(key).to(tl.uint32))
    if LARGE:
        word += (index >> 32).to(tl.uint32)
    word = _mix(word ^ tl.load(key + 1).to(tl.uint32))
    return (word >> 8).to(tl.float32) * (1.0 / (1 << 24))


@triton.jit
def _mix(word: tl.tensor) -> tl.tensor:
    """The interpreter's bijection of 32-bit words."""
    word = (word ^ (word >> 16)) * _FIRST
    word = (word ^ (word >> 15)) * _SECOND
    return word ^ (word >> 15)
