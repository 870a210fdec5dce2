"""Kernels of PyTorch that assume one memory order of their operands without a check, or whose results depend on it.

PyTorch lays the operands out before it calls them. Here the op is called directly: a worker's tensor may have another
memory order than the controller assumes, and the IR has no strides at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

aten: Final[Any] = torch.ops.aten

ORDERED: Final = frozenset(
    {
        aten.native_group_norm.default,
        aten.native_group_norm_backward.default,
        aten._pdist_forward.default,
        aten._pdist_backward.default,
        # They factor the transpose of a row-major matrix.
        aten._linalg_det.default,
        aten._linalg_slogdet.default,
    }
)


def ordered(overload: OpOverload[..., Any]) -> Callable[..., Any]:
    """The overload, or a function that calls it with operands that are contiguous."""
    if overload not in ORDERED:
        return overload

    def call(*args: Any, **kwargs: Any) -> Any:
        return overload(*map(_contiguous, args), **kwargs)

    return call


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value
