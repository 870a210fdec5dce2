"""Storages of the device that are made without a tensor, by deepcopy, torch.load and `torch.UntypedStorage(n, ...)`.

Such a storage has no element type until a tensor is set on it. Until then bytes that are copied into it stay on the
host.
"""

from __future__ import annotations

from typing import Any

import torch

from moaic.device.handles import dtype_name, new_storage
from moaic.device.identity import NAME
from moaic.device.lifecycle import LIFECYCLE
from moaic.runtime.controller import session
from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.dtypes import DTYPES


class HostBytes:
    """The content of a storage without a buffer; `host` is None while it is undefined."""

    __slots__ = ("host",)

    def __init__(self, host: torch.Tensor | None = None) -> None:
        self.host = host


def _buffer(storage: Any) -> Buffer | None:
    return getattr(storage, "moai", None)


def ensure_buffer(storage: Any, dtype: torch.dtype) -> None:
    """Give a storage a buffer of the first tensor's type; later tensors may view it as other types."""
    name = dtype_name(dtype)
    if _buffer(storage) is None:
        _make_buffer(storage, name if storage.nbytes() % dtype.itemsize == 0 else "u8")


def _make_buffer(storage: Any, name: str) -> None:
    waiting: HostBytes | None = getattr(storage, "moai_bytes", None)
    dtype = DTYPES[name]
    accelerator = session.accelerator()
    buffer = accelerator.buffer(name, (storage.nbytes() // dtype.itemsize,), (1,))
    if waiting is not None and waiting.host is not None:
        accelerator.upload(buffer, waiting.host.view(dtype))
    storage.moai = buffer


def new(size: Any) -> Any:
    """A storage of the device: of `size` bytes, undefined, or holding the bytes of a sequence."""
    LIFECYCLE.ensure_started()
    if isinstance(size, int):
        storage = new_storage(size)
        storage.moai_bytes = HostBytes()
        return storage
    content = torch.tensor(list(size), dtype=torch.uint8, device="cpu")
    return fill_from(new(content.numel()), content.untyped_storage())


def fill_from(target: Any, source: Any) -> Any:
    """Copy a storage of any device into a storage of the device of the same size."""
    if target.nbytes() != source.nbytes():
        raise RuntimeError(f"cannot copy a storage of {source.nbytes()} bytes into one of {target.nbytes()}")
    given, held = _buffer(source), _buffer(target)
    if held is not None:
        _overwrite(held, source)
    elif given is None:
        target.moai_bytes.host = _bytes_of(source).clone()
    else:
        accelerator = session.accelerator()
        target.moai = accelerator.buffer(given.dtype, given.shape, given.strides)
        accelerator.launch("aten.copy_", (whole(target.moai), whole(given)), {}, ())
    return target


def _overwrite(held: Buffer, source: Any) -> None:
    values = _bytes_of(source).view(DTYPES[held.dtype]).as_strided(held.shape, held.strides)
    accelerator = session.accelerator()
    fresh = accelerator.buffer(held.dtype, held.shape, held.strides)
    accelerator.upload(fresh, values)
    accelerator.launch("aten.copy_", (whole(held), whole(fresh)), {}, ())


def _bytes_of(storage: Any) -> torch.Tensor:
    """The content of a storage of any device, as bytes on the host."""
    host = fetch(storage) if storage.device.type == NAME else storage.cpu()
    return torch.tensor([], dtype=torch.uint8, device="cpu").set_(host)


def fetch(storage: Any) -> Any:
    """The content of a storage of the device as a storage of the host."""
    buffer = _buffer(storage)
    if buffer is None:
        waiting: HostBytes | None = getattr(storage, "moai_bytes", None)
        if waiting is None or waiting.host is None:
            return torch.UntypedStorage(storage.nbytes())
        return waiting.host.untyped_storage()
    dtype = DTYPES[buffer.dtype]
    laid = torch.zeros(storage.nbytes() // dtype.itemsize, dtype=dtype, device="cpu")
    laid.as_strided(buffer.shape, buffer.strides).copy_(session.accelerator().download(whole(buffer)))
    return laid.untyped_storage()
