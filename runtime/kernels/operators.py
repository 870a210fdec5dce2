"""Kernels as operators of PyTorch, for graphs that are compiled: Triton's on GPUs, the same in plain PyTorch elsewhere.

The IR's ops of the same names (`moai.rms_norm`) are these. Results lie whole in memory, whatever their operands do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.kernels import cross_entropy, gated, norm
from moaic.runtime.kernels.launch import Tile
from moaic.runtime.kernels.tiles import tile_of

Results = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, of the kernel that the tables know under this name."""

    schema: str
    kernel: str
    triton: Callable[..., Results]
    """Given a tile first."""
    plain: Callable[..., Results]

    @property
    def name(self) -> str:
        return self.schema.partition("(")[0]

    def on_gpu(self, *operands: Any) -> Results | Tensor:
        """The first operand's last dim is the one that tiles are for."""
        first: Tensor = operands[0]
        tile = tile_of(self.kernel, target_of(first.device), first.shape, first.dtype)
        assert tile is not None, f"{self.kernel} is not cut for {tuple(first.shape)}"
        return _one_or_more(self.triton(tile, *operands))

    def in_plain(self, *operands: Any) -> Results | Tensor:
        return _one_or_more(tuple(_whole(each) for each in self.plain(*operands)))


def _whole(tensor: Tensor) -> Tensor:
    """Contiguous, and seen to be so: a dim of one element counts as contiguous whatever its stride."""
    return tensor.contiguous().view(-1).view(tensor.shape)


def target_of(device: torch.device) -> str:
    """A GPU that is here, as the tables call it."""
    if torch.version.hip:
        properties: Any = torch.cuda.get_device_properties(device)
        return str(properties.gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _one_or_more(results: Results) -> Results | Tensor:
    first, *others = results
    return results if others else first


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _losses(tile: Tile, x: Tensor, weight: Tensor, labels: Tensor) -> Results:
    parts = cross_entropy.forward(x, weight, labels, tile)
    return cross_entropy.losses(parts, labels, len(weight)), parts.logsumexp()


def _plain_losses(x: Tensor, weight: Tensor, labels: Tensor) -> Results:
    logits = _wide(x) @ _wide(weight).T
    return cross_entropy.reference(_wide(x), _wide(weight), labels), logits.logsumexp(-1)


def _losses_backward(tile: Tile, x: Tensor, grad: Tensor, weight: Tensor, labels: Tensor, logsumexp: Tensor) -> Results:
    return cross_entropy.backward(grad, x, weight, labels, logsumexp, tile, classes=len(weight))


def _plain_losses_backward(x: Tensor, grad: Tensor, weight: Tensor, labels: Tensor, logsumexp: Tensor) -> Results:
    shares = (_wide(x) @ _wide(weight).T - logsumexp.unsqueeze(-1)).exp()
    hits = torch.arange(len(weight), device=x.device) == labels.unsqueeze(-1)
    above = torch.where(labels == cross_entropy.IGNORED, 0.0, grad)
    delta = (shares - hits.to(shares.dtype)) * above.unsqueeze(-1)
    return delta @ _wide(weight), delta.T @ _wide(x)


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


def _gated(tile: Tile, gate: Tensor, up: Tensor) -> Results:
    return (gated.forward(gate, up, gated.Act.SILU, tile),)


def _plain_gated(gate: Tensor, up: Tensor) -> Results:
    return (gated.reference(_wide(gate), _wide(up), gated.Act.SILU).to(gate.dtype),)


def _gated_backward(tile: Tile, gate: Tensor, up: Tensor, grad: Tensor) -> Results:
    return gated.backward(grad, gate, up, gated.Act.SILU, tile)


def _plain_gated_backward(gate: Tensor, up: Tensor, grad: Tensor) -> Results:
    g, share = _wide(gate), _wide(gate).sigmoid()
    dgate = _wide(grad) * _wide(up) * share * (1 + g * (1 - share))
    return dgate.to(gate.dtype), (_wide(grad) * g * share).to(up.dtype)


OPERATORS: Final = (
    Operator(
        "linear_cross_entropy(Tensor x, Tensor weight, Tensor labels) -> (Tensor, Tensor)",
        "linear_cross_entropy",
        _losses,
        _plain_losses,
    ),
    Operator(
        "linear_cross_entropy_backward(Tensor x, Tensor grad, Tensor weight, Tensor labels, Tensor logsumexp) -> "
        "(Tensor, Tensor)",
        "linear_cross_entropy",
        _losses_backward,
        _plain_losses_backward,
    ),
    Operator("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", "norm", _norm, _plain_norm),
    Operator(
        "rms_norm_of_sum(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
        "norm",
        _norm_of_sum,
        _plain_norm_of_sum,
    ),
    Operator(
        "rms_norm_backward(Tensor total, Tensor scale, Tensor weight, Tensor grad, Tensor? through) -> "
        "(Tensor, Tensor)",
        "norm",
        _norm_backward,
        _plain_norm_backward,
    ),
    Operator("swiglu(Tensor gate, Tensor up) -> Tensor", "gated", _gated, _plain_gated),
    Operator(
        "swiglu_backward(Tensor gate, Tensor up, Tensor grad) -> (Tensor, Tensor)",
        "gated",
        _gated_backward,
        _plain_gated_backward,
    ),
)

NAMESPACE: Final = "moai"

_LIBRARY: Final[Any] = torch.library.Library(NAMESPACE, "FRAGMENT")

for _each in OPERATORS:
    _LIBRARY.define(_each.schema)
    _LIBRARY.impl(_each.name, _each.on_gpu, "CUDA")
    _LIBRARY.impl(_each.name, _each.in_plain, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{_each.name}", _each.in_plain, lib=_LIBRARY)
