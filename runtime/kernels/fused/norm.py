"""RMSNorm and LayerNorm of x, or of x + residual, which is a result too: one read and one write of each tensor.

The statistics are those of the sum after rounding to its type, so that forward and backward use the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, launch, rows_of


class Normed(NamedTuple):
    """`y` and `total`, of the shape of x; `mean` and `scale` (1 / deviation), f32 by row, for the backward."""

    y: Tensor
    total: Tensor
    """x + residual, or x if there is no residual."""
    mean: Tensor | None
    scale: Tensor


class Gradients(NamedTuple):
    x: Tensor
    """The gradient of x, which is also that of the residual."""
    weight: Tensor
    """The gradient of the weight in f32, as is that of the bias."""
    bias: Tensor | None


def reference(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, bias: Tensor | None = None, layer: bool
) -> tuple[Tensor, Tensor]:
    """`y` and the sum in plain PyTorch; `layer` for LayerNorm, else RMSNorm."""
    total = x if residual is None else x + residual
    if layer:
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total
    return F.rms_norm(total, total.shape[-1:], weight, eps), total


def forward(
    x: Tensor,
    weight: Tensor,
    eps: float,
    tile: Tile,
    *,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    layer: bool,
) -> Normed:
    """Normalize the last dim of x[..., D], which the tile's columns must span; `layer` for LayerNorm, else RMSNorm."""
    flat = rows_of(x)
    rows, width = _fits(flat, tile)
    added = None if residual is None else rows_of(residual)
    y = flat.new_empty((rows, width))
    total = flat if added is None else torch.empty_like(y)
    mean = flat.new_empty(rows, dtype=torch.float32) if layer else None
    scale = flat.new_empty(rows, dtype=torch.float32)
    operands = (flat, added, weight.contiguous(), None if bias is None else bias.contiguous(), y, total, mean, scale)
    sizes = (flat.stride(0), 0 if added is None else added.stride(0), width)
    flags = {"LAYER": layer, "RESIDUAL": added is not None, "BIAS": bias is not None}
    launch(_forward, (rows,), tile, *operands, *sizes, eps, COLUMNS=tile.columns, **flags)
    return Normed(y.view(x.shape), x if added is None else total.view(x.shape), mean, scale)


def backward(
    grad: Tensor, weight: Tensor, normed: Normed, tile: Tile, *, through: Tensor | None = None, bias: bool = False
) -> Gradients:
    """The gradients from that of `y` and, if any, that of other uses of the sum (`through`)."""
    dy, total = rows_of(grad), rows_of(normed.total)
    rows, width = _fits(dy, tile)
    more = None if through is None else rows_of(through)
    dx = total.new_empty((rows, width))
    count = min(rows, tile.programs)
    dweight = total.new_empty((count, width), dtype=torch.float32)
    dbias = torch.empty_like(dweight) if bias else None
    operands = (dy, more, total, weight.contiguous(), normed.mean, normed.scale, dx, dweight, dbias)
    sizes = (dy.stride(0), 0 if more is None else more.stride(0), total.stride(0), rows, width)
    flags = {"LAYER": normed.mean is not None, "THROUGH": more is not None, "BIAS": bias}
    launch(_backward, (count,), tile, *operands, *sizes, COLUMNS=tile.columns, **flags)
    return Gradients(dx.view(grad.shape), dweight.sum(0), None if dbias is None else dbias.sum(0))


def _fits(x: Tensor, tile: Tile) -> tuple[int, int]:
    rows, width = x.shape
    if width > tile.columns:
        raise ValueError(f"rows of {width} elements do not fit into a tile of {tile.columns}")
    return rows, width


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """The Triton programs for elements of this type: both norms, with a residual, LayerNorm with its bias."""
    return tuple(made(element, tile, layer=layer) for layer in (False, True) for made in (_ahead, _back))


def _ahead(element: str, tile: Tile, *, layer: bool) -> TritonProgram:
    types = {
        **dict.fromkeys(("x", "residual", "weight", "bias", "y", "total"), f"*{element}"),
        **dict.fromkeys(("mean", "scale"), "*fp32"),
        **dict.fromkeys(("x_row", "residual_row", "width"), "i32"),
        "eps": "fp32",
    }
    return _program(_forward, types, tile, ("mean", "bias"), layer=layer, RESIDUAL=True)


def _back(element: str, tile: Tile, *, layer: bool) -> TritonProgram:
    types = {
        **dict.fromkeys(("dy", "more", "total", "weight", "dx"), f"*{element}"),
        **dict.fromkeys(("mean", "scale", "dweight", "dbias"), "*fp32"),
        **dict.fromkeys(("dy_row", "more_row", "total_row", "rows", "width"), "i32"),
    }
    return _program(_backward, types, tile, ("mean", "dbias"), layer=layer, THROUGH=True)


def _program(
    function: Any, types: Mapping[str, str], tile: Tile, of_layer: Sequence[str], *, layer: bool, **flags: bool
) -> TritonProgram:
    """One Triton program; the operands `of_layer`, which only a LayerNorm has, are None for an RMSNorm."""
    absent = () if layer else of_layer
    kept = {name: kind for name, kind in types.items() if name not in absent}
    return TritonProgram(
        function, kept, {**dict.fromkeys(absent), **flags, "LAYER": layer, "BIAS": layer, "COLUMNS": tile.columns}
    )


@triton.jit
def _forward(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    x_row: tl.tensor,
    residual_row: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    LAYER: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    inside = at < width
    h = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    if RESIDUAL:
        added = tl.load(residual + row * residual_row + at, mask=inside, other=0.0)
        h = (h.to(tl.float32) + added.to(tl.float32)).to(h.dtype)
        tl.store(total + row * width + at, h, mask=inside)
    h = h.to(tl.float32)
    if LAYER:
        middle = tl.sum(h, 0) / width
        tl.store(mean + row, middle)
        h = tl.where(inside, h - middle, 0.0)
    by = 1 / tl.sqrt_rn(tl.sum(h * h, 0) / width + eps)
    tl.store(scale + row, by)
    out = h * by * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, out, mask=inside)


@triton.jit
def _backward(
    dy: tl.tensor,
    more: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    dx: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    dy_row: tl.tensor,
    more_row: tl.tensor,
    total_row: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    LAYER: tl.constexpr,
    THROUGH: tl.constexpr,
    BIAS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of every n-th row, of n programs, and their partial sums for weight and bias."""
    at = tl.arange(0, COLUMNS)
    inside = at < width
    by_weight = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    to_weight = tl.zeros([COLUMNS], tl.float32)
    to_bias = tl.zeros([COLUMNS], tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        h = tl.load(total + row * total_row + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy + row * dy_row + at, mask=inside, other=0.0).to(tl.float32)
        by = tl.load(scale + row)
        if LAYER:
            h = tl.where(inside, h - tl.load(mean + row), 0.0)
        h *= by
        to_weight += g * h
        if BIAS:
            to_bias += g
        g *= by_weight
        out = g - h * (tl.sum(g * h, 0) / width)
        if LAYER:
            out -= tl.sum(g, 0) / width
        out *= by
        if THROUGH:
            out += tl.load(more + row * more_row + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * width + at, out, mask=inside)
    place = tl.program_id(0) * width + at
    tl.store(dweight + place, to_weight, mask=inside)
    if BIAS:
        tl.store(dbias + place, to_bias, mask=inside)
