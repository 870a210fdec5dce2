"""Grouped matrix products on GPUs: rows sorted by matrix, one kernel of PyTorch for all matrices, no wait for the host.

The kernel takes bfloat16, and rows that begin at multiples of 16 bytes. Rows of no matrix are sorted to the end, where
it writes nothing.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

ALIGNED: Final = 16
"""Bytes at which rows must begin."""

aten: Final[Any] = torch.ops.aten
"""`index` is an op here: indexing would make the device the current one, and it may not be here."""


def takes(device: torch.device, *operands: Tensor) -> bool:
    """Whether the kernel takes operands with these last dims on the device."""
    return device.type == "cuda" and all(
        each.dtype == torch.bfloat16 and each.numel() > 0 and not each.shape[-1] * each.itemsize % ALIGNED
        for each in operands
    )


class _Sorted(NamedTuple):
    """Rows in the order of their matrices."""

    order: Tensor
    """For each place the row, i64[s]."""
    ends: Tensor
    """For each matrix the place after its last row, i32[e]."""


def _sorted(ids: Tensor, count: int) -> _Sorted:
    key = torch.where((ids >= 0) & (ids < count), ids, count)
    keys, order = aten.sort.stable(key, stable=True)
    matrices = torch.arange(1, count + 1, device=ids.device, dtype=ids.dtype)
    return _Sorted(order, torch.searchsorted(keys, matrices).to(torch.int32))


def grouped_mm(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """[s, d], [e, f, d], [s] -> [s, f]."""
    order, ends = _sorted(ids, weight.shape[0])
    product = aten._grouped_mm(aten.index(x, [order]), weight.transpose(1, 2), ends)
    places = torch.arange(x.shape[0], device=x.device)
    written = torch.where((places < aten.select(ends, 0, -1)).unsqueeze(-1), product, 0)
    place_of = aten.scatter(torch.zeros_like(order), 0, order, places)
    return aten.index(written, [place_of])


def grouped_outer(grad: Tensor, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """[s, f], [s, d], [s] -> [e, f, d]: for each matrix the sum of the products of its rows."""
    order, ends = _sorted(ids, count)
    left, right = (aten.index(each, [order]) for each in (grad, x))
    sums = aten._grouped_mm(left.t(), right, ends)
    begins = torch.cat([ends.new_zeros(1), aten.slice(ends, 0, 0, -1)])
    return torch.where((ends > begins).unsqueeze(-1).unsqueeze(-1), sums, 0)
