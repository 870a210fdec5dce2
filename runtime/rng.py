"""Random numbers: a hash of (key, global index) in 32-bit words held in int64, the same on every device and plan."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

WORD: Final = 0xFFFFFFFF
MULTIPLIERS: Final = (0x21F0AAAD, 0x735A2D97)
"""Odd factors below 2**31, so that a 32-bit word times one of them fits an int64 without overflow."""


def mix(word: Any) -> Any:
    """A bijection of 32-bit words with good avalanche; works on ints and on int64 tensors alike."""
    word = ((word ^ (word >> 16)) * MULTIPLIERS[0]) & WORD
    word = ((word ^ (word >> 15)) * MULTIPLIERS[1]) & WORD
    return word ^ (word >> 15)


def global_index(
    shape: Sequence[int],
    global_shape: Sequence[int],
    splits: Sequence[Sequence[int]],
    coordinates: Sequence[Tensor],
    device: torch.device,
) -> Tensor:
    """Row-major index in the whole tensor of each element of one rank's part; i64 of `shape`.

    `splits` holds (dim, stride, size of the axis) and `coordinates` the rank's place on each of them.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device)
        digits = (
            sorted((stride, n, at) for (d, stride, n), at in zip(splits, coordinates, strict=True) if d == dim)
            if splits
            else []
        )
        # From the finest digit on: what lies below a digit is in its final place when the digit is put in.
        for stride, n, at in digits:
            along = (along // stride) * (stride * n) + at * stride + along % stride
        along = along * prod(global_shape[dim + 1 :])
        index = index + along.reshape([-1] + [1] * (len(shape) - 1 - dim))
    return index
