"""Writes by mask, `x[mask] = value`, as `torch.where`, which can be sharded and whose gradient has fixed sizes.

PyTorch's own gradient of the written value gathers the true elements: its size depends on values.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any, cast

import torch
from torch import Tensor


def assign(x: Tensor, index: Any, value: Any) -> None:
    """`x[index] = value`; PyTorch does it unless the index is one mask and slices."""
    split = _around_mask(cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,), x.dim())
    chosen = None if split is None else _spread(x, *split, value)
    if chosen is None:
        x[index] = value
        return
    view, mask, wide = chosen
    view.copy_(torch.where(mask, wide, view))


def _around_mask(index: tuple[Any, ...], rank: int) -> tuple[tuple[Any, ...], Tensor, tuple[Any, ...]] | None:
    """The slices before a mask, the mask, and the slices after it; None if the index has anything else."""
    masks = [each for each in index if isinstance(each, Tensor) and each.dtype == torch.bool and each.dim()]
    skipped = [each is Ellipsis for each in index]
    others = [isinstance(each, slice | EllipsisType) for each in index]
    if len(masks) != 1 or sum(others) != len(index) - 1:
        return None
    (mask,) = masks
    missing = (slice(None),) * (rank - mask.dim() - sum(others) + sum(skipped))
    full = [part for each in index for part in (missing if each is Ellipsis else (each,))]
    at = next(at for at, each in enumerate(full) if each is mask)
    return tuple(full[:at]), mask, tuple(full[at + 1 :])


def _spread(
    x: Tensor, before: tuple[Any, ...], mask: Tensor, after: tuple[Any, ...], value: Any
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The view that is written, and mask and value that broadcast to it; None if the value has one per true element."""
    view = x[(*before, *(slice(None) for _ in mask.shape), *after)]
    inner = view.dim() - len(before) - mask.dim()
    wide = value.to(x.dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    if wide.dim() > inner:
        outer, count, last = wide.shape[: wide.dim() - inner - 1], wide.shape[-inner - 1], wide.shape[-inner:]
        if count != 1:
            return None
        wide = wide.reshape(*outer, *(1 for _ in mask.shape), *(last if inner else ()))
    return view, mask.reshape(*mask.shape, *(1 for _ in range(inner))), wide
