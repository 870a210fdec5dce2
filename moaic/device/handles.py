"""Tensors of the device and the buffers behind them.

A tensor of the device has no data in this process. Its storage has an address that is never read, and the attribute
`moai` with the accelerator's `Buffer`. So views, `.data`, `detach`, parameters and autograd's copies share the buffer,
which is freed with the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final, NamedTuple

import torch

from moaic.device import torch_private
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import Buffer, View
from moaic.runtime.dtypes import DTYPE_NAMES, DTYPES

DEVICE: Final = torch_private.DEVICE

_numbers: Final = count()
"""Numbers addresses; `next` is atomic, so threads of backward may create tensors too."""

_FIRST_ADDRESS: Final = 1 << 60
_ADDRESS_STEP: Final = 1 << 31

_construct: Final = torch_private.construct_storage
_create: Final = torch_private.create_empty
_set_geometry: Final = torch_private.set_geometry_kernel()
_CPU_KEYS: Final = torch_private.CPU_KEYS


class Geometry(NamedTuple):
    """Element type, shape and strides of a tensor."""

    dtype: torch.dtype
    name: str
    """The element type's name in the IR."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    nbytes: int
    """Bytes from the first element to the end of the last."""


def dtype_name(dtype: torch.dtype) -> str:
    """The element type's name in the IR; TypeError for a type that the device does not support."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPE_NAMES)
        raise TypeError(f"device moai does not support {dtype}; valid: {known}") from None


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Number of elements from the first to the last, gaps included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def geometry(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Geometry:
    name = dtype_name(dtype)
    return Geometry(dtype, name, tuple(shape), tuple(strides), extent(shape, strides) * dtype.itemsize)


_geometry: Final = lru_cache(4096)(geometry)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Geometry of a tensor on any device, without its offset."""
    return geometry(tensor.dtype, tensor.shape, tensor.stride())


def new_storage(nbytes: int) -> Any:
    """A storage of the device without a buffer."""
    return _construct(_FIRST_ADDRESS + next(_numbers) * _ADDRESS_STEP, DEVICE, nbytes)


def full_tensor(like: Geometry, buffer: Buffer) -> torch.Tensor:
    """A new tensor over the whole of `buffer`, whose geometry is `like`."""
    storage = _construct(_FIRST_ADDRESS + next(_numbers) * _ADDRESS_STEP, DEVICE, like.nbytes)
    storage.moai = buffer
    return _set_geometry(_CPU_KEYS, _create(like.shape, like.dtype), storage, 0, like.shape, like.strides)


def new_tensor(like: Geometry) -> torch.Tensor:
    """An uninitialized tensor with a new buffer."""
    return full_tensor(like, session.accelerator().buffer(like.name, like.shape, like.strides))


def tensor_of(
    buffer: Buffer, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool = False
) -> torch.Tensor:
    """The tensor of a buffer that has none yet; `shape` and `strides` are those of the buffer, in elements.

    Called once per buffer: two calls make two storages, whose tensors do not share memory for torch.
    """
    tensor = full_tensor(_geometry(DTYPES[buffer.dtype], shape, strides), buffer)
    return tensor.requires_grad_() if requires_grad else tensor


def view_of(tensor: torch.Tensor) -> View:
    """The buffer of a tensor of the device, with the tensor's geometry.

    Raises TypeError for a tensor of another device.
    """
    storage: Any = tensor.untyped_storage()
    try:
        buffer: Buffer = storage.moai
    except AttributeError:
        raise TypeError(f"expected a tensor on device moai, got one on {tensor.device}") from None
    offset: Any = tensor.storage_offset()
    return View(buffer, tensor.shape, tensor.stride(), offset, tensor.dtype)


def is_ours(tensor: torch.Tensor) -> bool:
    return tensor.device.type == torch_private.NAME
