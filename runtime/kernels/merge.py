"""Attention over one more block of keys, merged into what the blocks before it gave: a step of ring attention.

Each part is a softmax over its own keys, with the logsumexp of its scores; the merge weighs both parts as one softmax
over all keys would. The backward needs nothing of this: each of its steps starts from the logsumexp of all keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.launch import Program, Tile, blocks, launch


def reference(out: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """In plain PyTorch: the merged result and its logsumexp."""
    whole = torch.logaddexp(logsumexp, more_logsumexp)
    # A row that has seen no key yet has no weight at all.
    finite = torch.where(whole == -torch.inf, 0.0, whole)
    weights = ((each - finite).exp().unsqueeze(-1) for each in (logsumexp, more_logsumexp))
    first, second = weights
    return out * first + more * second, whole


def merge(out: Tensor, logsumexp: Tensor, more: Tensor, more_logsumexp: Tensor, tile: Tile) -> None:
    """In place into f32 out[B, H, S, D] and logsumexp[B, H, S], both contiguous; `more` is of any type and strides.

    A row that has seen no key has logsumexp -inf and a result of zeros. The tile's columns must span D.
    """
    batch, heads, length, width = out.shape
    if width > tile.columns:
        raise ValueError(f"heads of {width} elements do not fit into a tile of {tile.columns}")
    grid = (blocks(length, tile.rows), heads, batch)
    operands = (out, logsumexp, more, more_logsumexp.contiguous(), *more.stride(), heads, length, width)
    launch(_merge, grid, tile, *operands, ROWS=tile.rows, COLUMNS=tile.columns)


def programs(element: str, tile: Tile) -> tuple[Program, ...]:
    """What is compiled for parts of this type."""
    types = {
        **dict.fromkeys(("out", "logsumexp", "more_logsumexp"), "*fp32"),
        "more": f"*{element}",
        **dict.fromkeys(("more_batch", "more_head", "more_row", "heads", "length", "width"), "i32"),
    }
    return (Program(_merge, types, {"more_column": 1, "ROWS": tile.rows, "COLUMNS": tile.columns}),)


@triton.jit
def _merge(
    out: tl.tensor,
    logsumexp: tl.tensor,
    more: tl.tensor,
    more_logsumexp: tl.tensor,
    more_batch: tl.tensor,
    more_head: tl.tensor,
    more_row: tl.tensor,
    more_column: tl.tensor,
    heads: tl.tensor,
    length: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some rows of one head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    here = row < length
    inside = here[:, None] & (column < width)[None, :]
    flat = (batch * heads + head) * length + row
    a = tl.load(logsumexp + flat, mask=here, other=float("-inf"))
    b = tl.load(more_logsumexp + flat, mask=here, other=float("-inf"))
    peak = tl.maximum(a, b)
    # A row that has seen no key yet has no weight at all, rather than -inf - -inf.
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    left, right = tl.exp(a - peak), tl.exp(b - peak)
    seen = left + right > 0
    total = tl.where(seen, left + right, 1.0)
    by = 1 / total
    tl.store(logsumexp + flat, tl.where(seen, peak + tl.log(total), float("-inf")), mask=here)
    own = out + flat[:, None] * width + column[None, :]
    from_more = more + batch * more_batch + head * more_head + row[:, None] * more_row + column[None, :] * more_column
    mine = tl.load(own, mask=inside, other=0.0) * (left * by)[:, None]
    theirs = tl.load(from_more, mask=inside, other=0.0).to(tl.float32) * (right * by)[:, None]
    tl.store(own, mine + theirs, mask=inside)
