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

GAINS: Final[Gains] = {}
"""Time of Inductor's version over the kernel's, forward and backward, as `bench/test_kernels.py` prints it on a GPU.

A kernel without an entry is unmeasured, and never used.
"""


def measured_kernels(target: str, gains: Gains = GAINS) -> tuple[str, ...]:
    """The kernels with a measurement on a GPU, whether a gain or a loss."""
    return tuple(kernel for kernel, by_target in gains.items() if by_target.get(target))


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
