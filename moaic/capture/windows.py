"""Overlapping windows by `as_strided`, as index ops into the dims that the windows cover."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor


def as_strided(x: Tensor, size: Sequence[Any], stride: Sequence[Any], storage_offset: int | None = None) -> Tensor:
    """`x.as_strided(...)`, as an index op where that is equal: then the other dims can be sharded."""
    size = [int(each) if isinstance(each, Tensor) else each for each in size]
    if _is_plain(x, size, stride, storage_offset):
        first = _same_at_front(x, size, stride)
        for last in range(_same_at_end(x, size, stride, first), -1, -1):
            found = _looked_up(x, size, stride, first, last)
            if found is not None:
                return found
    return torch.as_strided(x, size, stride, storage_offset)


def _is_plain(x: Tensor, size: Sequence[Any], stride: Sequence[Any], offset: int | None) -> bool:
    """Whether windows begin at the first element of `x`, and every size is a number."""
    numbers = all(isinstance(each, int) for each in (*size, *stride, *x.shape))
    return numbers and offset in (None, x.storage_offset()) and 0 not in (*size, *x.shape)


def _looked_up(x: Tensor, size: Sequence[int], stride: Sequence[int], first: int, last: int) -> Tensor | None:
    """The windows over the dims between the `first` and the `last` ones; None if they reach beyond these dims."""
    end = x.dim() - last
    run, step = prod(x.shape[first:end]), x.stride(end - 1)
    sizes, strides = size[first : len(size) - last], stride[first : len(size) - last]
    joined = all(x.stride(at) == x.stride(at + 1) * x.shape[at + 1] for at in range(first, end - 1))
    if not sizes or not step or not joined or any(each % step for each in strides):
        return None
    steps = [each // step for each in strides]
    if sum((count - 1) * each for count, each in zip(sizes, steps, strict=True)) >= run:
        return None
    places = _places(sizes, steps, x.device)
    return x.reshape(*x.shape[:first], run, *x.shape[end:])[(*(slice(None) for _ in range(first)), places)]


def _same_at_front(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> int:
    """The number of dims at the front that are those of `x`; the last dim of `x` is left to the windows."""
    count = 0
    while count < min(x.dim() - 1, len(size)) and (size[count], stride[count]) == (x.shape[count], x.stride(count)):
        count += 1
    return count


def _same_at_end(x: Tensor, size: Sequence[int], stride: Sequence[int], front: int) -> int:
    """The number of dims at the end that are those of `x`, not counting those at the front."""
    count = 0
    most = min(x.dim(), len(size)) - front - 1
    while count < most and (size[-1 - count], stride[-1 - count]) == (x.shape[-1 - count], x.stride(-1 - count)):
        count += 1
    return count


def _places(sizes: Sequence[int], steps: Sequence[int], device: torch.device) -> Tensor:
    """For each element of the windows, its index in the dims that the windows cover."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for at, (count, step) in enumerate(zip(sizes, steps, strict=True)):
        along = torch.arange(count, device=device) * step
        places = places + along.reshape(-1, *(1 for _ in sizes[at + 1 :]))
    return places
