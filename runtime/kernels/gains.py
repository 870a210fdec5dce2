"""Measured gains of the kernels, by GPU and shape: a kernel is used only where the table has a gain for it.

The module imports neither Triton nor torch: a worker reads it first, and imports kernels and patterns only on a GPU
for which a kernel has a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

KernelShape = tuple[int, ...]

Gains = Mapping[str, Mapping[str, Mapping[KernelShape, float]]]
"""The gain by kernel, target and shape."""

Wins = Callable[[str, KernelShape, str], bool]
"""Whether a kernel is worth using at a shape, for an element type of the IR."""

GAINS: Final[Gains] = {
    "norm": {"sm_90": {(4096, 2048): 1.00}},
    "gated": {"sm_90": {(4096, 8192): 1.00}},
    "rotary": {"sm_90": {(1, 32, 4096, 64): 1.00}},
    "merge": {"sm_90": {(1, 32, 4096, 64): 1.14, (1, 32, 4096, 128): 1.28}},
    "exchange": {"sm_90": {(8, 512, 256): 0.83}},
}
"""Time without a kernel over the time with it, as `bench/gpu.py` measured it on an H200.

A kernel in the place of ops of functions competes with what Inductor fuses around these ops, so its time is that of a
whole step: of a Llama of 1B parameters, with all such kernels. Alone, rotary takes 0.58 of Inductor's time. The other
kernels run between functions; their times, alone, are beside Inductor's version. At 8 x 512 x 512, exchange took a
quarter of Inductor's time, in one run of ten microseconds: too little to go by. A kernel without an entry is
unmeasured, and never used.
"""

IN_FUNCTIONS: Final = ("norm", "gated", "rotary")
"""The kernels in the place of ops of functions."""


def winning_in_functions(target: str, gains: Gains = GAINS) -> tuple[str, ...]:
    """The kernels that gain at some shape in the functions of a GPU."""
    measured = {kernel: gains.get(kernel, {}).get(target, {}) for kernel in IN_FUNCTIONS}
    return tuple(kernel for kernel, known in measured.items() if any(gain > 1 for gain in known.values()))


def worth_using(kernel: str, target: str, shape: Sequence[int], gains: Gains = GAINS) -> bool:
    """Whether a kernel was measured to win on a GPU at the largest measured shape that fits into `shape`.

    False if `shape` is below every measured shape.
    """
    known = gains.get(kernel, {}).get(target, {})
    smaller = [measured for measured in known if all(a <= b for a, b in zip(measured, shape, strict=True))]
    return bool(smaller) and known[max(smaller, key=prod)] > 1


def in_words(kernel: str, target: str, gains: Gains = GAINS) -> str:
    """The measured gains of a kernel on a GPU, for the documentation."""
    known = gains.get(kernel, {}).get(target, {})
    parts = (f"{known[shape]:.2f}x at {' x '.join(map(str, shape))}" for shape in sorted(known))
    return ", ".join(parts) or "unmeasured, off by default"
