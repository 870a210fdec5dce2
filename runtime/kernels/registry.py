"""The kernels there are, what each is beside, and what each was measured to gain: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

from moaic.runtime.kernels.fused import adamw, bucket, cross_entropy, dropout, exchange, gated, merge, norm, rotary
from moaic.runtime.kernels.launch import Tile, TritonProgram

KernelShape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, the same in plain PyTorch, and what is known of its speed."""

    name: str
    summary: str
    place: str
    """What it takes the place of where it wins; empty where Inductor or PyTorch has the better form so far."""
    kernel: Callable[..., Any]
    """Its forward, or all of it."""
    backward: Callable[..., Any] | None
    """Or what undoes it."""
    reference: Callable[..., Any]
    programs: Callable[[str, Tile], tuple[TritonProgram, ...]]
    """What is compiled, for an element type in Triton's words and a tile."""
    dims: str
    """What the numbers of a shape are."""
    shapes: tuple[KernelShape, ...]
    """Of a 1B and an 8B Llama at 4096 tokens: what it is timed on."""
    gains: Mapping[str, Mapping[KernelShape, float]] = field(default_factory=dict[str, Mapping[KernelShape, float]])
    """Time of Inductor's version over its own, forward and backward, by target and shape; as measured on a GPU."""


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
            "adamw",
            "a step of AdamW over one flat shard, with the gradient's cast, its clipping scale and the low-precision "
            "copy of the parameters",
            "",
            adamw.update,
            None,
            adamw.reference,
            adamw.programs,
            "elements",
            ((1 << 26,), (1 << 28,)),
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
            "dropout",
            "dropout with the numbers of `moai.rand`, the same under every plan; no mask is kept",
            "",
            dropout.forward,
            dropout.forward,
            dropout.reference,
            dropout.programs,
            "tokens, width",
            ((4096, 2048), (4096, 4096)),
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
            "bucket",
            "tensors into one flat bucket for a collective, in another type and scaled, and out of it",
            "",
            bucket.pack,
            bucket.unpack,
            bucket.reference,
            bucket.programs,
            "elements",
            ((1 << 24,), (1 << 26,)),
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
"""By name. A kernel without a gain is unmeasured, and so never worth using."""


def worth_using(kernel: Kernel, target: str, shape: Sequence[int]) -> bool:
    """Whether it was measured to win on this GPU, at the largest of the measured shapes that fits into this one.

    Below every measured shape nothing is known, and the answer is no.
    """
    known = kernel.gains.get(target, {})
    smaller = [each for each in known if all(a <= b for a, b in zip(each, shape, strict=True))]
    return bool(smaller) and known[max(smaller, key=prod)] > 1


def measured(kernel: Kernel, target: str) -> str:
    """What is known of its speed on a GPU, in words."""
    known = kernel.gains.get(target, {})
    told = (f"{known[shape]:.2f}x at {' x '.join(map(str, shape))}" for shape in sorted(known))
    return ", ".join(told) or "unmeasured, off by default"
