"""Outputs that alias a result or an argument of the call: which of them, and the views that lead to the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """Shape and strides of a dense result that is not row-major, and the order of dims in which it is."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]
    """The dims by stride, the largest first."""


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """A call of an op that returns a view, or several, of which `item` is the index."""

    op: OpOverload[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    item: int | None = None

    def of(self, base: Tensor) -> Tensor:
        made = self.op(base, *self.arguments, **dict(self.keywords))
        return made if self.item is None else made[self.item]


@dataclass(frozen=True, slots=True)
class OutputView:
    """An output as a chain of views of a result or of an argument of the call."""

    kind: Literal["result", "argument"]
    index: int
    views: tuple[OutputAlias, ...] = ()
    known: bool = True
    """Whether autograd sees the output as a view; not if nothing else shares its memory."""

    def of(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> Tensor:
        tensor = (results if self.kind == "result" else arguments)[self.index]
        for view in self.views:
            tensor = view.of(tensor)
        if self.known:
            return tensor
        alone = _not_a_view(tensor, tensor.storage_offset(), tensor.shape, tensor.stride())
        return _resolved(alone, conj=tensor.is_conj(), neg=tensor.is_neg())


def _resolved(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """Apply the lazy conjugation and negation of a view, which its storage does not hold."""
    tensor = tensor.conj_physical_() if conj else tensor
    return tensor.neg_() if neg else tensor


def memory_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> MemoryOrder | None:
    """The order of a dense tensor that is not row-major; None for any other, whose strides need not be restored."""
    wide = [dim for dim, size in enumerate(shape) if size != 1]
    order = sorted(wide, key=lambda dim: -strides[dim])
    if strides == _strides(shape, range(len(shape))) or not _is_dense(shape, strides, order):
        return None
    return MemoryOrder(shape, strides, (*(dim for dim in range(len(shape)) if dim not in wide), *order))


def _is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    return 0 not in shape and all(_strides(shape, order)[dim] == strides[dim] for dim in order)


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor whose dims vary in this order, the last one fastest."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def with_strides(result: Tensor, order: MemoryOrder | None) -> Tensor:
    """A row-major result with the shape and strides of the output; not a view, so that it may be overwritten."""
    if order is not None:
        return _not_a_view(result, 0, order.shape, order.strides)
    return _not_a_view(result, result.storage_offset(), result.shape, result.stride()) if result._is_view() else result


def _not_a_view(tensor: Tensor, offset: Any, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor in the same memory that autograd does not see as a view."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, shape, strides)
