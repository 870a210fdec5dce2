"""SwiGLU and GeGLU: act(gate) * up. Gate and up may be halves of one matrix; the backward reads only the inputs."""

from __future__ import annotations

from enum import StrEnum

import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl
from torch import Tensor

from moaic.runtime.kernels.triton_launch import Tile, TritonProgram, blocks, launch, rows_of


class Act(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"


def reference(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """The result in plain PyTorch."""
    if act is Act.SILU:
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if act is Act.GELU_TANH else "none") * up


def forward(gate: Tensor, up: Tensor, act: Act, tile: Tile) -> Tensor:
    """The result for gate[..., D] and up[..., D], rounded once."""
    g, u = rows_of(gate), rows_of(up)
    out = g.new_empty(g.shape)
    sizes = (g.stride(0), u.stride(0), g.shape[1])
    launch(_forward, _grid(g, tile), tile, g, u, out, *sizes, ACT=str(act), COLUMNS=tile.columns)
    return out.view(gate.shape)


def backward(grad: Tensor, gate: Tensor, up: Tensor, act: Act, tile: Tile) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    d, g, u = rows_of(grad), rows_of(gate), rows_of(up)
    dgate, dup = g.new_empty(g.shape), u.new_empty(u.shape)
    sizes = (d.stride(0), g.stride(0), u.stride(0), g.shape[1])
    launch(_backward, _grid(g, tile), tile, d, g, u, dgate, dup, *sizes, ACT=str(act), COLUMNS=tile.columns)
    return dgate.view(gate.shape), dup.view(up.shape)


def _grid(x: Tensor, tile: Tile) -> tuple[int, int]:
    return x.shape[0], blocks(x.shape[1], tile.columns)


def programs(element: str, tile: Tile) -> tuple[TritonProgram, ...]:
    """The Triton programs for elements of this type."""
    forwards = {
        **dict.fromkeys(("gate", "up", "out"), f"*{element}"),
        **dict.fromkeys(("gate_row", "up_row", "width"), "i32"),
    }
    backwards = {
        **dict.fromkeys(("grad", "gate", "up", "dgate", "dup"), f"*{element}"),
        **dict.fromkeys(("grad_row", "gate_row", "up_row", "width"), "i32"),
    }
    return tuple(
        TritonProgram(function, types, {"ACT": str(act), "COLUMNS": tile.columns})
        for act in Act
        for function, types in ((_forward, forwards), (_backward, backwards))
    )


@triton.jit
def _forward(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    width: tl.tensor,
    ACT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    g = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, g * _share(g, ACT) * u, mask=inside)


@triton.jit
def _backward(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    dgate: tl.tensor,
    dup: tl.tensor,
    grad_row: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    width: tl.tensor,
    ACT: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    d = tl.load(grad + row * grad_row + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + at, mask=inside, other=0.0).to(tl.float32)
    share = _share(g, ACT)
    tl.store(dup + row * width + at, d * g * share, mask=inside)
    tl.store(dgate + row * width + at, (d * u * (share + g * _slope(g, share, ACT))), mask=inside)


@triton.jit
def _share(g: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """act(g) / g: the share of g that passes."""
    if ACT == "silu":
        share = tl.sigmoid(g)
    elif ACT == "gelu":
        share = 0.5 * (1 + tl.erf(g * 0.7071067811865476))  # the root of 1/2
    else:
        # (1 + tanh z) / 2 is the logistic function of 2 z; 1.59... is twice the root of 2 / pi.
        share = tl.sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
    return share


@triton.jit
def _slope(g: tl.tensor, share: tl.tensor, ACT: tl.constexpr) -> tl.tensor:
    """The derivative of `_share`."""
    if ACT == "silu":
        slope = share * (1 - share)
    elif ACT == "gelu":
        slope = 0.3989422804014327 * tl.exp(-0.5 * g * g)  # the normal density: one over the root of 2 pi
    else:
        slope = share * (1 - share) * 1.5957691216057308 * (1 + 3 * 0.044715 * g * g)
    return slope
