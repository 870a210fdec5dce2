"""Outputs that lie in memory of something else: which result or argument of a call, and the views that lead there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch._ops import OpOverload


@dataclass(frozen=True, slots=True)
class Laid:
    """How a result lies in memory where its dims are not in the order of its strides: the last dim varies fastest."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    order: tuple[int, ...]
    """The dims by stride, the largest first: in this order the result is row-major."""


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """A call of an op that gives a view; of the one at place `item` if it gives several."""

    op: OpOverload[..., Any]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    item: int | None = None

    def of(self, base: Tensor) -> Tensor:
        made = self.op(base, *self.arguments, **dict(self.keywords))
        return made if self.item is None else made[self.item]


@dataclass(frozen=True, slots=True)
class Seen:
    """An output as views of a result, or of an argument, of the call."""

    kind: Literal["result", "argument"]
    index: int
    views: tuple[OutputAlias, ...] = ()
    known: bool = True
    """Whether autograd is to know of the views: not of those that nothing else shares memory with."""

    def among(self, results: Sequence[Tensor], arguments: Sequence[Any]) -> Tensor:
        tensor = (results if self.kind == "result" else arguments)[self.index]
        for view in self.views:
            tensor = view.of(tensor)
        if self.known:
            return tensor
        alone = _placed(tensor, tensor.storage_offset(), tensor.shape, tensor.stride())
        return _done(alone, conj=tensor.is_conj(), neg=tensor.is_neg())


def _done(tensor: Tensor, *, conj: bool, neg: bool) -> Tensor:
    """With what a view had still to be done to every number, of which its storage says nothing."""
    tensor = tensor.conj_physical_() if conj else tensor
    return tensor.neg_() if neg else tensor


def laid(shape: tuple[int, ...], strides: tuple[int, ...]) -> Laid | None:
    """None for what is row-major anyway, or has gaps: then it is of no use to say how it lay."""
    wide = [dim for dim, size in enumerate(shape) if size != 1]
    order = sorted(wide, key=lambda dim: -strides[dim])
    if strides == _strides(shape, range(len(shape))) or not _is_dense(shape, strides, order):
        return None
    return Laid(shape, strides, (*(dim for dim in range(len(shape)) if dim not in wide), *order))


def _is_dense(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    return 0 not in shape and all(_strides(shape, order)[dim] == strides[dim] for dim in order)


def _strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Those without gaps where dims vary in this order, the last one fastest."""
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    return tuple(strides)


def placed(result: Tensor, lies: Laid | None) -> Tensor:
    """A result, row-major in the order that its dims lie in, seen as what it is; no view, so it may be overwritten."""
    if lies is not None:
        return _placed(result, 0, lies.shape, lies.strides)
    return _placed(result, result.storage_offset(), result.shape, result.stride()) if result._is_view() else result


def _placed(tensor: Tensor, offset: Any, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """A tensor in the same memory that is no view of this one."""
    return tensor.new_empty(0).set_(tensor.untyped_storage(), offset, shape, strides)
