"""Dense gradients where a module asks for sparse ones, as by `sparse=True`: the device holds dense tensors only.

Optimizers that take both, such as SGD and Adagrad, compute the same from either.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from moaic.device import torch_private
from moaic.device.cpu_fallback import user_stack_level
from moaic.device.generic_kernels import functional
from moaic.runtime.protocol.aten_schema import signature_of

aten: Final[Any] = torch.ops.aten


@cache
def _warn_once(call: str, argument: str) -> None:
    warnings.warn(
        f"device moai gives dense gradients for {call}({argument}=True): SGD and Adagrad compute the same from them, "
        f"SparseAdam refuses them: leave {argument}=True out and use Adam, or keep this part on the cpu",
        stacklevel=user_stack_level(),
    )


def _embedding(grad: Tensor, indices: Tensor, rows: int, padding: int, scale_by_frequency: bool) -> Tensor:
    _warn_once("nn.Embedding", "sparse")
    return aten.embedding_dense_backward(grad, indices, rows, padding, scale_by_frequency)


def _gather(source: Tensor, dim: int, index: Tensor, grad: Tensor) -> Tensor:
    _warn_once("torch.gather", "sparse_grad")
    return source.new_zeros(source.shape).scatter_add(dim, index, grad)


_AUTOGRAD: Final[Mapping[str, Callable[..., Tensor]]] = {
    "aten::embedding_sparse_backward": _embedding,
    "aten::_gather_sparse_backward": _gather,
}
"""Ops that PyTorch composes of others before it looks for a kernel of the device."""

_SPARSE: Final = 9
"""The place of the argument `sparse` of `_embedding_bag_backward`."""


def bag_is_sparse(args: Sequence[Any]) -> bool:
    """Whether a call of `_embedding_bag_backward` asks for a sparse gradient."""
    return args[_SPARSE]


def dense_bag(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of `_embedding_bag_backward`, from one that makes dense gradients only."""

    def run(*args: Any) -> Any:
        if not bag_is_sparse(args):
            return backward(*args)
        _warn_once("nn.EmbeddingBag", "sparse")
        return backward(*args[:_SPARSE], False, *args[_SPARSE + 1 :])

    return run


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::_embedding_bag_backward": dense_bag(functional(signature_of(aten._embedding_bag_backward.default))),
}
"""By torch's name of the op."""


def install() -> None:
    """Register the gradients of composed ops, which captured programs take, too."""
    registry = torch_private.Registry("aten", "AutogradPrivateUse1")
    for name, kernel in _AUTOGRAD.items():
        registry.add(name, kernel)
