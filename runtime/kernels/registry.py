"""The catalogue of kernels: each with its reference in plain PyTorch, and the shapes it is timed on.

`gains` holds what each was measured to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moaic.runtime.kernels.fused import cross_entropy, exchange, gated, merge, norm, rotary
from moaic.runtime.kernels.gains import KernelShape
from moaic.runtime.kernels.launch import Tile, TritonProgram


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and its reference in plain PyTorch."""

    name: str
    summary: str
    place: str
    """What it replaces where it wins."""
    kernel: Callable[..., Any]
    """Its forward, or all of it."""
    backward: Callable[..., Any] | None
    """Its backward, or its inverse."""
    reference: Callable[..., Any]
    programs: Callable[[str, Tile], tuple[TritonProgram, ...]]
    """The Triton functions to compile for an element type in Triton's words and a tile."""
    dims: str
    """Names of the numbers of a shape."""
    shapes: tuple[KernelShape, ...]
    """The shapes it is timed on: those of a 1B and an 8B Llama at 4096 tokens."""


KERNELS: Final[Mapping[str, Kernel]] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "linear_cross_entropy",
            "a linear layer and the cross entropy over its output, over a vocabulary that ranks may share; logits are "
            "never in memory",
            "ops of functions",
            cross_entropy.forward,
            cross_entropy.backward,
            cross_entropy.reference,
            cross_entropy.programs,
            "tokens, classes, width",
            ((4096, 128256, 2048), (4096, 128256, 4096)),
        ),
        Kernel(
            "norm",
            "RMSNorm or LayerNorm of x + residual, whose sum is a result too",
            "ops of functions",
            norm.forward,
            norm.backward,
            norm.reference,
            norm.programs,
            "tokens, width",
            ((4096, 2048), (4096, 4096)),
        ),
        Kernel(
            "gated",
            "SwiGLU and GeGLU: act(gate) * up, where both may be halves of one matrix",
            "ops of functions",
            gated.forward,
            gated.backward,
            gated.reference,
            gated.programs,
            "tokens, width",
            ((4096, 8192), (4096, 14336)),
        ),
        Kernel(
            "rotary",
            "rotary position embedding of q or k, after an RMSNorm of each head where a model has one",
            "ops of functions",
            rotary.forward,
            rotary.backward,
            rotary.reference,
            rotary.programs,
            "batch, heads, tokens, width of a head",
            ((1, 32, 4096, 64), (1, 32, 4096, 128)),
        ),
        Kernel(
            "merge",
            "attention over one more block of keys, merged into what came before: a step of ring attention",
            "a turn of a ring",
            merge.merge,
            None,
            merge.reference,
            merge.programs,
            "batch, heads, tokens, width of a head",
            ((1, 32, 4096, 64), (1, 32, 4096, 128)),
        ),
        Kernel(
            "exchange",
            "a tensor cut along a digit of a dim into parts that lie one after another, for an all-to-all, and put "
            "together again",
            "cutting and joining for collectives",
            exchange.pack,
            exchange.unpack,
            exchange.reference,
            exchange.programs,
            "parts, runs in each, elements of a run",
            ((8, 512, 256), (8, 512, 512)),
        ),
    )
}
"""By name."""
