"""Kernels as operators of PyTorch, for compiled graphs: the Triton kernel on GPUs, plain PyTorch elsewhere.

The IR has ops of the same names (`moai.rms_norm`). Results are contiguous whatever the strides of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.kernels.fused import gated, norm, rotary
from moaic.runtime.kernels.tiles import tile_of
from moaic.runtime.kernels.triton_launch import Tile, target_of

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class KernelOperator:
    """One operator, and the name of its kernel in the tables."""

    schema: str
    kernel: str
    triton: Callable[..., Results]
    """The Triton kernel; its first argument is the tile."""
    plain: Callable[..., Results]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    def on_gpu(self, *operands: Any) -> Results | Tensor:
        """Run the Triton kernel with the tile for the last dim of the first operand."""
        first: Tensor = operands[0]
        tile = tile_of(self.kernel, target_of(first.device), first.shape)
        assert tile is not None, f"{self.kernel} has no tile for {tuple(first.shape)}"
        return _one_or_more(self.triton(tile, *operands))

    def in_plain(self, *operands: Any) -> Results | Tensor:
        return _one_or_more(tuple(_contiguous(each) for each in self.plain(*operands)))


def _contiguous(tensor: Tensor) -> Tensor:
    """The tensor, contiguous, with row-major strides for dims of size 1 too, whose strides could be any."""
    if not tensor.is_contiguous():
        # Not the method `contiguous`, which initializes the GPU even while a graph is traced for an absent one.
        tensor = torch.ops.aten.clone(tensor, memory_format=torch.contiguous_format)
    return tensor.view(-1).view(tensor.shape)


def _one_or_more(results: Results) -> Results | Tensor:
    first, *others = results
    return results if others else first


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _norm(tile: Tile, x: Tensor, weight: Tensor, eps: float) -> Results:
    made = norm.forward(x, weight, eps, tile, layer=False)
    return made.y, made.scale.view(*x.shape[:-1], 1)


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Results:
    y, _ = norm.reference(x, weight, eps, layer=False)
    return y, (_wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()


def _norm_of_sum(tile: Tile, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Results:
    made = norm.forward(x, weight, eps, tile, residual=residual, layer=False)
    return made.y, made.total, made.scale.view(*x.shape[:-1], 1)


def _plain_norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Results:
    total = x + residual
    y, scale = _plain_norm(total, weight, eps)
    return y, total, scale


def _norm_backward(
    tile: Tile, total: Tensor, scale: Tensor, weight: Tensor, grad: Tensor, through: Tensor | None
) -> Results:
    normed = norm.Normed(total, total, None, scale.reshape(-1))
    made = norm.backward(grad, weight, normed, tile, through=through)
    return made.x, made.weight


def _plain_norm_backward(total: Tensor, scale: Tensor, weight: Tensor, grad: Tensor, through: Tensor | None) -> Results:
    normed, above = _wide(total) * scale, _wide(grad)
    slope = above * weight
    dx = scale * (slope - normed * (slope * normed).mean(-1, keepdim=True))
    dx = dx if through is None else dx + through
    return dx.to(total.dtype), (above * normed).flatten(0, -2).sum(0)


def _layer_norm(tile: Tile, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Results:
    made = norm.forward(x, weight, eps, tile, bias=bias, layer=True)
    assert made.mean is not None
    return made.y, made.mean.view(*x.shape[:-1], 1), made.scale.view(*x.shape[:-1], 1)


def _plain_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Results:
    y, _ = norm.reference(x, weight, eps, bias=bias, layer=True)
    variance, mean = torch.var_mean(_wide(x), -1, correction=0, keepdim=True)
    return y, mean, (variance + eps).rsqrt()


def _layer_norm_of_sum(
    tile: Tile, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Results:
    made = norm.forward(x, weight, eps, tile, residual=residual, bias=bias, layer=True)
    assert made.mean is not None
    return made.y, made.total, made.mean.view(*x.shape[:-1], 1), made.scale.view(*x.shape[:-1], 1)


def _plain_layer_norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Results:
    total = x + residual
    y, mean, scale = _plain_layer_norm(total, weight, bias, eps)
    return y, total, mean, scale


def _layer_norm_backward(
    tile: Tile, total: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, grad: Tensor, through: Tensor | None
) -> Results:
    normed = norm.Normed(total, total, mean.reshape(-1), scale.reshape(-1))
    made = norm.backward(grad, weight, normed, tile, through=through, bias=True)
    assert made.bias is not None
    return made.x, made.weight, made.bias


def _plain_layer_norm_backward(
    total: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, grad: Tensor, through: Tensor | None
) -> Results:
    normed, above = (_wide(total) - mean) * scale, _wide(grad)
    slope = above * weight
    dx = scale * (slope - slope.mean(-1, keepdim=True) - normed * (slope * normed).mean(-1, keepdim=True))
    dx = dx if through is None else dx + through
    return dx.to(total.dtype), (above * normed).flatten(0, -2).sum(0), above.flatten(0, -2).sum(0)


def _act(approximate: str | None) -> gated.Act:
    """The form of GELU by PyTorch's name for it; SiLU for None."""
    return {None: gated.Act.SILU, "none": gated.Act.GELU, "tanh": gated.Act.GELU_TANH}[approximate]


def _gated(tile: Tile, gate: Tensor, up: Tensor, approximate: str | None = None) -> Results:
    return (gated.forward(gate, up, _act(approximate), tile),)


def _plain_gated(gate: Tensor, up: Tensor, approximate: str | None = None) -> Results:
    return (gated.reference(_wide(gate), _wide(up), _act(approximate)).to(gate.dtype),)


def _gated_backward(tile: Tile, gate: Tensor, up: Tensor, grad: Tensor, approximate: str | None = None) -> Results:
    return gated.backward(grad, gate, up, _act(approximate), tile)


def _plain_gated_backward(gate: Tensor, up: Tensor, grad: Tensor, approximate: str | None = None) -> Results:
    g, above, aten = _wide(gate), _wide(grad), torch.ops.aten
    under = above * _wide(up)
    if approximate is None:
        dgate, acted = aten.silu_backward(under, g), aten.silu(g)
    else:
        dgate, acted = (
            aten.gelu_backward(under, g, approximate=approximate),
            aten.gelu(g, approximate=approximate),
        )
    return dgate.to(gate.dtype), (above * acted).to(up.dtype)


def _rotary(tile: Tile, x: Tensor, cos: Tensor, sin: Tensor) -> Results:
    return (rotary.forward(x, cos.squeeze(1), sin.squeeze(1), tile),)


def _plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Results:
    return (rotary.reference(_wide(x), _wide(cos.squeeze(1)), _wide(sin.squeeze(1))).to(x.dtype),)


def _rotary_backward(tile: Tile, grad: Tensor, cos: Tensor, sin: Tensor) -> Results:
    dx, _ = rotary.backward(grad, grad, cos.squeeze(1), sin.squeeze(1), tile)
    return (dx,)


def _plain_rotary_backward(grad: Tensor, cos: Tensor, sin: Tensor) -> Results:
    above = _wide(grad)
    first, second = (above * _wide(sin)).chunk(2, -1)
    return ((above * _wide(cos) + torch.cat([second, -first], -1)).to(grad.dtype),)


OPERATORS: Final = (
    KernelOperator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", "norm", _norm, _plain_norm),
    KernelOperator(
        "rms_norm_of_sum(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
        "norm",
        _norm_of_sum,
        _plain_norm_of_sum,
    ),
    KernelOperator(
        "rms_norm_backward(Tensor total, Tensor scale, Tensor weight, Tensor grad, Tensor? through) -> "
        "(Tensor, Tensor)",
        "norm",
        _norm_backward,
        _plain_norm_backward,
    ),
    KernelOperator(
        "layer_norm(Tensor x, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
        "norm",
        _layer_norm,
        _plain_layer_norm,
    ),
    KernelOperator(
        "layer_norm_of_sum(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        "norm",
        _layer_norm_of_sum,
        _plain_layer_norm_of_sum,
    ),
    KernelOperator(
        "layer_norm_backward(Tensor total, Tensor mean, Tensor scale, Tensor weight, Tensor grad, Tensor? through) -> "
        "(Tensor, Tensor, Tensor)",
        "norm",
        _layer_norm_backward,
        _plain_layer_norm_backward,
    ),
    KernelOperator("swiglu(Tensor gate, Tensor up) -> Tensor", "gated", _gated, _plain_gated),
    KernelOperator(
        "swiglu_backward(Tensor gate, Tensor up, Tensor grad) -> (Tensor, Tensor)",
        "gated",
        _gated_backward,
        _plain_gated_backward,
    ),
    KernelOperator("geglu(Tensor gate, Tensor up, str approximate) -> Tensor", "gated", _gated, _plain_gated),
    KernelOperator(
        "geglu_backward(Tensor gate, Tensor up, Tensor grad, str approximate) -> (Tensor, Tensor)",
        "gated",
        _gated_backward,
        _plain_gated_backward,
    ),
    KernelOperator("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", "rotary", _rotary, _plain_rotary),
    KernelOperator(
        "rotary_backward(Tensor grad, Tensor cos, Tensor sin) -> Tensor",
        "rotary",
        _rotary_backward,
        _plain_rotary_backward,
    ),
)

NAMESPACE: Final = "moai"

_LIBRARY: Final[Any] = torch.library.Library(NAMESPACE, "FRAGMENT")

for _each in OPERATORS:
    _LIBRARY.define(_each.schema)
    _LIBRARY.impl(_each.name, _each.on_gpu, "CUDA")
    _LIBRARY.impl(_each.name, _each.in_plain, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{_each.name}", _each.in_plain, lib=_LIBRARY)
