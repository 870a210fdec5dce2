"""The catalogue of kernels: each with its reference in plain PyTorch and the shapes at which it is timed.

The measured gains are in `gains`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moaic.runtime.kernels.fused import exchange, gated, merge, norm, rotary
from moaic.runtime.kernels.gains import KernelShape
from moaic.runtime.kernels.triton_launch import Tile, TritonProgram


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and its reference in plain PyTorch."""

    name: str
    summary: str
    place: str
    """The part of a program that it replaces."""
    kernel: Callable[..., Any]
    """Its forward, or the only function of it."""
    backward: Callable[..., Any] | None
    """Its backward, or its inverse."""
    reference: Callable[..., Any]
    programs: Callable[[str, Tile], tuple[TritonProgram, ...]]
    """The Triton programs to compile for an element type (Triton's name) and a tile."""
    dims: str
    """Names of the dims of a shape."""
    shapes: tuple[KernelShape, ...]
    """The shapes at which it is timed: those of a 1B and an 8B Llama at 4096 tokens."""


KERNELS: Final[Mapping[str, Kernel]] = {
    kernel.name: kernel
    for kernel in (
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
            "attention over one more block of keys, merged into the result so far: a step of ring attention",
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
            "a tensor cut along a sub-axis of a dim into contiguous parts, for an all-to-all, and joined again",
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
"""The kernels by name."""
