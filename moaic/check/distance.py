"""The distance between a result of a plan and the same result of one device."""

from __future__ import annotations

from math import inf, isnan

import torch
from torch import Tensor


def distance(one: Tensor, other: Tensor, floor: float = 0.0) -> float:
    """Largest difference of two elements, relative to the largest element of `other` or to `floor`.

    Equal infinities do not differ, nor do elements that are NaN in both; NaN in one of them is an infinite distance.
    """
    one, other = _numbers(one), _numbers(other)
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if not differs.any():
        return 0.0
    apart = (one - other)[differs].abs().max().item() / max(largest(other), floor, 1e-300)
    return inf if isnan(apart) else apart


def largest(tensor: Tensor) -> float:
    """The largest absolute value of the finite elements; 0 if there is none."""
    numbers = _numbers(tensor)
    finite = numbers[numbers.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
