"""Kernels of PyTorch that assume one memory order of their operands without a check, or whose results depend on it.

PyTorch lays the operands out before it calls them. Here the op is called directly: a worker's tensor may have another
memory order than the controller assumes, and the IR has no strides at all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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


FUSED: Final = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
"""Optimizers that go through the memory of a parameter, its gradient and its state side by side, by packet."""


def ordered(overload: OpOverload[..., Any]) -> Callable[..., Any]:
    """The overload, or a function that calls it with operands that are contiguous, or that lie alike."""
    if overload.overloadpacket.__name__ in FUSED:
        return partial(_call_alike, overload)
    if overload not in ORDERED:
        return overload

    def call(*args: Any, **kwargs: Any) -> Any:
        return overload(*map(_contiguous, args), **kwargs)

    return call


def _call_alike(overload: OpOverload[..., Any], *lists: list[Tensor], **kwargs: Any) -> Any:
    """Calls an op that writes lists of tensors; those that lie otherwise than the first at their index are copied."""
    if all(tensor.is_contiguous() for tensors in lists for tensor in tensors):
        return overload(*lists, **kwargs)
    alike = [list(map(_alike, tensors, lists[0])) for tensors in lists]
    result = overload(*alike, **kwargs)
    for tensors, copies in zip(lists, alike, strict=True):
        for tensor, copy in zip(tensors, copies, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
    return result


def _alike(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.shape != like.shape or tensor.stride() == like.stride():
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value
