"""Attention over one more block of keys, merged into the result over the blocks before it: a step of ring attention.

A part is the softmax over the keys of its block, with the logsumexp of its scores. The total is the sum of the parts,
each times its weight: exp(its logsumexp - the largest logsumexp so far). After the last part, the caller divides by the
sum of weights. The backward does not merge: each of its steps starts from the logsumexp of all keys.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.online_softmax import merged
from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch

_UNITS = ("out_column", "more_column", "total_row", "part_row")
"""Strides that are 1 for results of attention kernels."""


def reference(out: Tensor, weight: Tensor, largest: Tensor, more: Tensor, logsumexp: Tensor) -> None:
    """`merge` in plain PyTorch, in place."""
    merged(out, weight, largest, more, logsumexp)


def merge(out: Tensor, weight: Tensor, largest: Tensor, more: Tensor, logsumexp: Tensor, tile: Tile) -> None:
    """Merge `more`, of any type, in place into f32 out[B, H, S, D], weight and largest [B, H, S] of equal strides.

    A row that attends to no key of a part has logsumexp -inf there. The tile's columns must span D.
    """
    batch, heads, length, width = out.shape
    if width > tile.columns:
        raise ValueError(f"heads of {width} elements do not fit into a tile of {tile.columns}")
    if out.numel() and weight.stride() != largest.stride():
        raise ValueError(f"strides of weight {weight.stride()} and largest {largest.stride()} differ")
    grid = (blocks(length, tile.rows), heads, batch)
    strides = (*out.stride(), *more.stride(), *weight.stride(), *logsumexp.stride())
    operands = (out, weight, largest, more, logsumexp, *strides, length, width)
    launch(_merge, grid, tile, *operands, ROWS=tile.rows, COLUMNS=tile.columns)


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """The Triton programs for parts of this type."""
    strides = (f"{of}_{dim}" for of in ("out", "more", "total", "part") for dim in ("batch", "head", "row"))
    types = {
        **dict.fromkeys(("out", "weight", "largest", "logsumexp"), "*fp32"),
        "more": f"*{element}",
        **dict.fromkeys((*(each for each in strides if each not in _UNITS), "length", "width"), "i32"),
    }
    return (TritonProgram(_merge, types, {**dict.fromkeys(_UNITS, 1), "ROWS": tile.rows, "COLUMNS": tile.columns}),)


@triton.jit
def _merge(
    out: tl.tensor,
    weight: tl.tensor,
    largest: tl.tensor,
    more: tl.tensor,
    logsumexp: tl.tensor,
    out_batch: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    out_column: tl.tensor,
    more_batch: tl.tensor,
    more_head: tl.tensor,
    more_row: tl.tensor,
    more_column: tl.tensor,
    total_batch: tl.tensor,
    total_head: tl.tensor,
    total_row: tl.tensor,
    part_batch: tl.tensor,
    part_head: tl.tensor,
    part_row: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows of one head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    here = row < length
    inside = here[:, None] & (column < width)[None, :]
    so_far = batch * total_batch + head * total_head + row * total_row
    a = tl.load(largest + so_far, mask=here, other=float("-inf"))
    b = tl.load(logsumexp + batch * part_batch + head * part_head + row * part_row, mask=here, other=float("-inf"))
    larger = tl.maximum(a, b)
    # A row without any key so far gets weight 0, not the NaN of -inf - -inf.
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    kept, share = tl.exp(a - finite), tl.exp(b - finite)
    sum_of_weights = tl.load(weight + so_far, mask=here, other=0.0) * kept + share
    own = out + batch * out_batch + head * out_head + row[:, None] * out_row + column[None, :] * out_column
    theirs = more + batch * more_batch + head * more_head + row[:, None] * more_row + column[None, :] * more_column
    total = tl.load(own, mask=inside, other=0.0) * kept[:, None]
    total += tl.load(theirs, mask=inside, other=0.0).to(tl.float32) * share[:, None]
    # Several threads read the numbers of a row, and one of them overwrites these.
    tl.debug_barrier()
    tl.store(weight + so_far, sum_of_weights, mask=here)
    tl.store(largest + so_far, larger, mask=here)
    tl.store(own, total, mask=inside)
