"""Rotary position embedding of the heads of q or k, optionally after an RMSNorm of each head (QK norm).

The first half of a head rotates against the second, as in Llama. Each half reads its own angles: in models both are
equal, but a function does not know that of its operands. The backward recomputes the norm from the inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch


def reference(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """The result in plain PyTorch: x[B, H, S, D], cos and sin [1 or B, S, D], the norm's weight[D]."""
    if weight is not None:
        x = F.rms_norm(x, x.shape[-1:], weight, eps)
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def forward(
    x: Tensor, cos: Tensor, sin: Tensor, tile: Tile, *, weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """The result for operands as in `reference`, x of any strides; the tile's columns must span D / 2."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operands = (x, cos.contiguous(), sin.contiguous(), None if weight is None else weight.contiguous(), out)
    constants = {"NORMED": weight is not None, "ROWS": tile.rows, "COLUMNS": tile.columns}
    launch(_forward, _grid(x, tile), tile, *operands, *x.stride(), *_sizes(x, cos, tile), eps, **constants)
    return out


def backward(
    grad: Tensor, x: Tensor, cos: Tensor, sin: Tensor, tile: Tile, *, weight: Tensor | None = None, eps: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and, in f32, of the norm's weight."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = _grid(x, tile)
    parts = None if weight is None else x.new_empty((*grid, x.shape[-1]), dtype=torch.float32)
    weight = None if weight is None else weight.contiguous()
    operands = (grad, x, cos.contiguous(), sin.contiguous(), weight, dx, parts)
    constants = {"NORMED": weight is not None, "ROWS": tile.rows, "COLUMNS": tile.columns}
    strides = (*grad.stride(), *x.stride())
    launch(_backward, grid, tile, *operands, *strides, *_sizes(x, cos, tile), eps, **constants)
    return dx, None if parts is None else parts.sum((0, 1, 2))


def _grid(x: Tensor, tile: Tile) -> tuple[int, int, int]:
    return blocks(x.shape[2], tile.rows), x.shape[1], x.shape[0]


def _sizes(x: Tensor, cos: Tensor, tile: Tile) -> tuple[int, int, int]:
    """The stride of the angles between batches, the number of positions, and half the width of a head."""
    length, width = x.shape[2:]
    if width % 2 or width > 2 * tile.columns:
        raise ValueError(f"heads of {width} elements are odd, or do not fit into a tile of twice {tile.columns}")
    return 0 if cos.shape[0] == 1 else length * width, length, width // 2


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """The Triton programs for elements of this type, with the norm and without."""
    sizes = {**dict.fromkeys(("angle_batch", "length", "half"), "i32"), "eps": "fp32"}
    of_x = dict.fromkeys(("x_batch", "x_head", "x_row"), "i32")
    of_grad = dict.fromkeys(("grad_batch", "grad_head", "grad_row"), "i32")
    angles = dict.fromkeys(("cos", "sin"), "*fp32")
    forwards = {**dict.fromkeys(("x", "weight", "out"), f"*{element}"), **angles, **of_x, **sizes}
    backwards = {
        **dict.fromkeys(("grad", "x", "weight", "dx"), f"*{element}"),
        **angles,
        "parts": "*fp32",
        **of_grad,
        **of_x,
        **sizes,
    }
    made: list[TritonProgram] = []
    for function, types in ((_forward, forwards), (_backward, backwards)):
        for normed in (False, True):
            absent = () if normed else ("weight", "parts")
            kept = {name: kind for name, kind in types.items() if name not in absent}
            units = {name: 1 for name in ("x_column", "grad_column") if name in function.arg_names}
            gone = {name: None for name in absent if name in types}
            flags = {"NORMED": normed, "ROWS": tile.rows, "COLUMNS": tile.columns}
            made.append(TritonProgram(function, kept, {**units, **gone, **flags}))
    return tuple(made)


@triton.jit
def _forward(
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    angle_batch: tl.tensor,
    length: tl.tensor,
    half: tl.tensor,
    eps: tl.tensor,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some positions of one head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < length)[:, None] & (column < half)[None, :]
    at = x + batch * x_batch + head * x_head + row.to(tl.int64)[:, None] * x_row + column[None, :] * x_column
    a, b = _wide(at, inside), _wide(at + half * x_column, inside)
    if NORMED:
        by = _scale(a, b, half, eps)
        a *= by * _wide(weight + column, column < half)[None, :]
        b *= by * _wide(weight + half + column, column < half)[None, :]
    angle = batch * angle_batch + row[:, None] * 2 * half + column[None, :]
    c, s = _wide(cos + angle, inside), _wide(sin + angle, inside)
    d, t = _wide(cos + angle + half, inside), _wide(sin + angle + half, inside)
    to = out + ((batch * tl.num_programs(1) + head) * length + row[:, None]) * 2 * half + column[None, :]
    tl.store(to, a * c - b * s, mask=inside)
    tl.store(to + half, b * d + a * t, mask=inside)


@triton.jit
def _backward(
    grad: tl.tensor,
    x: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    weight: tl.tensor,
    dx: tl.tensor,
    parts: tl.tensor,
    grad_batch: tl.tensor,
    grad_head: tl.tensor,
    grad_row: tl.tensor,
    grad_column: tl.tensor,
    x_batch: tl.tensor,
    x_head: tl.tensor,
    x_row: tl.tensor,
    x_column: tl.tensor,
    angle_batch: tl.tensor,
    length: tl.tensor,
    half: tl.tensor,
    eps: tl.tensor,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some positions of one head, and their share of the weight's gradient."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < length)[:, None] & (column < half)[None, :]
    angle = batch * angle_batch + row[:, None] * 2 * half + column[None, :]
    c, s = _wide(cos + angle, inside), _wide(sin + angle, inside)
    d, t = _wide(cos + angle + half, inside), _wide(sin + angle + half, inside)
    above = grad + batch * grad_batch + head * grad_head + row.to(tl.int64)[:, None] * grad_row
    above += column[None, :] * grad_column
    first, second = _wide(above, inside), _wide(above + half * grad_column, inside)
    # The inverse rotation.
    da = first * c + second * t
    db = second * d - first * s
    if NORMED:
        at = x + batch * x_batch + head * x_head + row.to(tl.int64)[:, None] * x_row + column[None, :] * x_column
        a, b = _wide(at, inside), _wide(at + half * x_column, inside)
        by = _scale(a, b, half, eps)
        a *= by
        b *= by
        _store_parts(parts, tl.sum(da * a, 0), tl.sum(db * b, 0), column, half)
        da, db = _norm_backward(da, db, a, b, by, weight + column, column, half)
    to = dx + ((batch * tl.num_programs(1) + head) * length + row[:, None]) * 2 * half + column[None, :]
    tl.store(to, da, mask=inside)
    tl.store(to + half, db, mask=inside)


@triton.jit
def _norm_backward(
    da: tl.tensor,
    db: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    by: tl.tensor,
    weight: tl.tensor,
    column: tl.tensor,
    half: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """The gradients of both halves of the norm's operand from those of its result; a and b are the normed halves."""
    da *= _wide(weight, column < half)[None, :]
    db *= _wide(weight + half, column < half)[None, :]
    mean = (tl.sum(da * a, 1) + tl.sum(db * b, 1))[:, None] / (2 * half)
    return by * (da - a * mean), by * (db - b * mean)


@triton.jit
def _store_parts(parts: tl.tensor, first: tl.tensor, second: tl.tensor, column: tl.tensor, half: tl.tensor):
    """Store this program's share of the weight's gradient, for both halves of a head."""
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    program = (batch * tl.num_programs(1) + head) + tl.program_id(0) * tl.num_programs(1) * tl.num_programs(2)
    place = parts + program * 2 * half + column
    tl.store(place, first, mask=column < half)
    tl.store(place + half, second, mask=column < half)


@triton.jit
def _wide(at: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """The loaded elements in f32; zero outside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scale(a: tl.tensor, b: tl.tensor, half: tl.tensor, eps: tl.tensor) -> tl.tensor:
    """1 / the root mean square of each row, which consists of the halves a and b."""
    return (1 / tl.sqrt_rn((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps))[:, None]
