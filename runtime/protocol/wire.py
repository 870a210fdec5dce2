"""Tensors as blocks of frames: the bytes of a tensor in row-major order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.protocol.frames import BlockMemory


def memory(block: Tensor) -> memoryview:
    """The bytes of a block, in place."""
    return block.numpy().data


def tensors(allocate: Callable[[int], Tensor]) -> BlockMemory[Tensor]:
    """Blocks that are received into one-dimensional u8 tensors, which `allocate` makes."""
    return BlockMemory(allocate, memory)


def _unpinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


TENSORS: Final = tensors(_unpinned)
"""Blocks in pageable memory of the host."""


def as_block(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in row-major order as bytes of the host, without a copy if it is already so."""
    return bytes_of(tensor.contiguous().cpu())


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    flat = tensor.detach().view(-1)
    # A tensor of one element is contiguous whatever its stride, but a view of another type needs stride 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def from_block(block: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor whose row-major bytes are `block`, sharing its memory."""
    # Not by view(): autograd forbids in-place writes to a view that a custom function returns.
    start = int(block.storage_offset()) // dtype.itemsize
    tensor: Any = torch.empty(0, dtype=dtype)
    return tensor.set_(block.untyped_storage(), start, tuple(shape))
