"""Refuse writes into overlapping memory as PyTorch does, before an op is sent to the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from moaic.device import torch_private
from moaic.runtime.protocol.aten_schema import Signature


def check_written(target: torch.Tensor, *read: torch.Tensor) -> None:
    """Raise for a write into a tensor that overlaps itself, or one of the tensors that are read."""
    if not target.numel():
        return
    if any(step == 0 and size > 1 for size, step in zip(target.shape, target.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )
    if any(_overlap_in_part(target, each) for each in read if torch_private.share(target, each)):
        raise RuntimeError(
            "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
            "memory location. Please clone() the tensor before performing the operation."
        )


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same storage, geometry and type."""
    return one is other or (
        torch_private.share(one, other) and all(property_(one) == property_(other) for property_ in _IDENTITY)
    )


_IDENTITY: Final[tuple[Callable[[torch.Tensor], object], ...]] = (
    torch.Tensor.storage_offset,
    torch.Tensor.size,
    torch.Tensor.stride,
    lambda tensor: tensor.dtype,
    torch.Tensor.is_conj,
    torch.Tensor.is_neg,
)


def _overlap_in_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two dense tensors of one storage overlap without being equal; False for tensors with gaps."""
    if not other.numel() or not (_is_dense(one) and _is_dense(other)):
        return False
    (begin, end), (start, stop) = _bytes(one), _bytes(other)
    if (begin, end) == (start, stop):
        return one.stride() != other.stride()
    return begin < stop and start < end


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    offset: Any = tensor.storage_offset()
    return offset * tensor.itemsize, (offset + tensor.numel()) * tensor.itemsize


def check_call(signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`check_written` for each tensor that an elementwise op writes."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    for position in signature.written:
        written = signature.argument(position, args, kwargs)
        check_written(written, *(each for each in given if each is not written))
