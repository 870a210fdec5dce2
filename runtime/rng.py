"""Random numbers: a hash of (key, global index) in 32-bit words stored as int64, equal on all devices and plans."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

WORD: Final = 0xFFFFFFFF
MULTIPLIERS: Final = (0x21F0AAAD, 0x735A2D97)
"""Odd factors below 2**31, so that a 32-bit word times one of them fits an int64 without overflow."""

SHIFTS: Final = (16, 15, 15)


def mix(word: Any) -> Any:
    """A bijection of 32-bit words with good avalanche, for ints and for int64 tensors."""
    word = ((word ^ (word >> SHIFTS[0])) * MULTIPLIERS[0]) & WORD
    word = ((word ^ (word >> SHIFTS[1])) * MULTIPLIERS[1]) & WORD
    return word ^ (word >> SHIFTS[2])


def global_index(
    shape: Sequence[int],
    global_shape: Sequence[int],
    splits: Sequence[Sequence[int]],
    coordinates: Sequence[Tensor],
    device: torch.device,
) -> Tensor:
    """The row-major index in the global tensor of each element of one rank's part; i64 of `shape`.

    `splits` lists (dim, stride, size of the axis), and `coordinates` the rank's coordinate on each of these axes.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        along = torch.arange(size, device=device)
        sub_axes = (
            sorted((stride, n, at) for (d, stride, n), at in zip(splits, coordinates, strict=True) if d == dim)
            if splits
            else []
        )
        # By rising stride: the index within `stride` is final when the coordinate is inserted above it.
        for stride, n, at in sub_axes:
            along = (along // stride) * (stride * n) + at * stride + along % stride
        along = along * prod(global_shape[dim + 1 :])
        index = index + along.reshape([-1] + [1] * (len(shape) - 1 - dim))
    return index
