"""A step of AdamW over one flat shard in one pass, with the gradient's cast and scale and the low-precision copy."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch


@dataclass(frozen=True, slots=True)
class AdamW:
    """The settings, as torch.optim.AdamW names them."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2


def reference(
    master: Tensor, grad: Tensor, mean: Tensor, square: Tensor, scale: Tensor, step: int, settings: AdamW
) -> None:
    """In plain PyTorch, in place, as torch.optim.AdamW orders it."""
    grad = grad.to(master.dtype) * scale
    master.mul_(1 - settings.lr * settings.weight_decay)
    mean.lerp_(grad, 1 - settings.beta1)
    square.mul_(settings.beta2).addcmul_(grad, grad, value=1 - settings.beta2)
    rate, root = _corrected(step, settings)
    master.addcdiv_(mean, square.sqrt() / root + settings.eps, value=-rate)


def update(
    master: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    scale: Tensor,
    step: int,
    settings: AdamW,
    tile: Tile,
    copy: Tensor | None = None,
) -> None:
    """In place: f32 `master`, `mean`, `square` [n] from grad[n] of any type, times `scale` f32[], which the device has.

    The scale is that of clipping, over that of the loss; a `copy` of the parameters gets them in its own type. `step`
    counts from 1.
    """
    shard = (master, grad, mean, square, master if copy is None else copy)
    strides = (each.stride(0) for each in shard)
    rate, root = _corrected(step, settings)
    betas = (settings.beta1, 1 - settings.beta1, settings.beta2, 1 - settings.beta2)
    factors = (rate, root, *betas, settings.eps, 1 - settings.lr * settings.weight_decay)
    count, constants = master.numel(), {"COPIED": copy is not None, "COLUMNS": tile.columns}
    launch(_update, (blocks(count, tile.columns),), tile, *shard, scale, *strides, count, *factors, **constants)


def _corrected(step: int, settings: AdamW) -> tuple[float, float]:
    """The rate over the first bias correction, and the root of the second; in the host's float64."""
    return settings.lr / (1 - settings.beta1**step), (1 - settings.beta2**step) ** 0.5


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """What is compiled for gradients and copies of this type."""
    names = ("master", "grad", "mean", "square", "copy")
    types = {
        **dict.fromkeys(("master", "mean", "square", "scale"), "*fp32"),
        **dict.fromkeys(("grad", "copy"), f"*{element}"),
        "count": "i32",
        **dict.fromkeys(("rate", "root", "beta1", "rest1", "beta2", "rest2", "eps", "kept"), "fp32"),
    }
    strides = {f"{name}_stride": 1 for name in names}
    return (TritonProgram(_update, types, {**strides, "COPIED": True, "COLUMNS": tile.columns}),)


@triton.jit
def _update(
    master: tl.tensor,
    grad: tl.tensor,
    mean: tl.tensor,
    square: tl.tensor,
    copy: tl.tensor,
    scale: tl.tensor,
    master_stride: tl.tensor,
    grad_stride: tl.tensor,
    mean_stride: tl.tensor,
    square_stride: tl.tensor,
    copy_stride: tl.tensor,
    count: tl.tensor,
    rate: tl.tensor,
    root: tl.tensor,
    beta1: tl.tensor,
    rest1: tl.tensor,
    beta2: tl.tensor,
    rest2: tl.tensor,
    eps: tl.tensor,
    kept: tl.tensor,
    COPIED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < count
    g = tl.load(grad + at * grad_stride, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    m = tl.load(mean + at * mean_stride, mask=inside, other=0.0)
    v = tl.load(square + at * square_stride, mask=inside, other=0.0)
    p = tl.load(master + at * master_stride, mask=inside, other=0.0)
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p = p * kept - rate * m / (tl.sqrt_rn(v) / root + eps)
    tl.store(mean + at * mean_stride, m, mask=inside)
    tl.store(square + at * square_stride, v, mask=inside)
    tl.store(master + at * master_stride, p, mask=inside)
    if COPIED:
        tl.store(copy + at * copy_stride, p, mask=inside)
