"""Hooks that are needed before the first use of the device; calls that do not involve `moai` pass through unchanged.

`import torch` loads this file, so it imports no heavy module of moaic at the top.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch

from moaic.device import torch_private
from moaic.device.identity import IN_USE, NAME, is_moai


@cache
def install(other: torch.device | None) -> None:
    """Install the hooks once; `other` is the accelerator that PyTorch was built for, if any."""
    torch_private.STORAGE_NEW.patch(_storage_new)
    torch_private.STORAGE_COPY.patch(_storage_copy)
    torch_private.STORAGE_WRITE.patch(_storage_write)
    torch_private.STORAGE_READ.patch(_storage_read)
    torch_private.STORAGE_ITEM.patch(_storage_item)
    torch_private.STORAGE_SWAP.patch(_storage_swap)
    torch_private.MODULE_APPLY.patch(_module_apply)
    torch_private.generator_new().patch(_generator_new)
    torch_private.CURRENT_ACCELERATOR.patch(partial(_current_accelerator, other))
    torch_private.ANY_ACCELERATOR.patch(_any_accelerator)
    torch_private.COMPILE_WRAPPER.patch(_one_at_a_time)
    torch.serialization.register_package(9, _tag, _restore)


def _one_at_a_time(real: Callable[..., Any]) -> Callable[..., Any]:
    lock = threading.RLock()

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return real(*args, **kwargs)

    return call


def _storage_new(real: Any) -> Any:
    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_moai(kwargs.get("device")):
            return real(cls, *args, **kwargs)
        from moaic.device import storages

        return storages.new(args[0] if args else kwargs.get("size", 0))

    return new


def _storage_copy(real: Any) -> Any:
    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        if self.device.type != NAME and source.device.type != NAME:
            return real(self, source, bool(non_blocking))
        from moaic.device import storages

        if self.device.type == NAME:
            return storages.fill_from(self, source)
        return real(self, storages.fetch(source), False)

    return copy_


def _storage_write(real: Any) -> Any:
    def write(self: Any, *args: Any) -> Any:
        if self.device.type != NAME:
            return real(self, *args)
        from moaic.device import storages

        return real(storages.fetch(self), *args)

    return write


def _storage_read(real: Any) -> Any:
    def read(self: Any, *args: Any) -> Any:
        if self.device.type != NAME:
            return real(self, *args)
        from moaic.device import storages

        host = torch.UntypedStorage(self.nbytes(), device="cpu")
        real(host, *args)
        return storages.fill_from(self, host)

    return read


def _storage_item(real: Any) -> Any:
    def item(self: Any, index: Any) -> Any:
        if self.device.type != NAME:
            return real(self, index)
        from moaic.device import storages

        return real(storages.fetch(self), index)

    return item


def _storage_swap(real: Any) -> Any:
    def byteswap(self: Any, dtype: torch.dtype) -> None:
        if self.device.type == NAME:
            raise NotImplementedError("the bytes of a storage on device moai cannot be swapped: fetch it with .cpu()")
        real(self, dtype)

    return byteswap


def _module_apply(real: Any) -> Any:
    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        from moaic.device.module_moves import Move

        # TorchScript's own references to a parameter do not follow an exchange of its tensor.
        if isinstance(self, torch.jit.ScriptModule):
            _name_parameters(self)
            return real(self, fn.convert if isinstance(fn, Move) else fn, recurse)
        return real(self, fn if isinstance(fn, Move) else Move(fn), recurse)

    return apply


def _name_parameters(module: Any) -> None:
    """Make the parameters of a TorchScript module that was loaded from a file `nn.Parameter`s again."""
    for name, tensor in list(module._parameters.items()):
        if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
            module._parameters[name] = torch.nn.Parameter(tensor.detach(), tensor.requires_grad)


def _generator_new(real: Any) -> Any:
    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Generator and is_moai(args[0] if args else kwargs.get("device")):
            raise NotImplementedError(
                "device moai has no generator of its own: eager random ops draw from the CPU's, so use "
                "torch.Generator() for tensors on moai, or torch.manual_seed()"
            )
        return real(cls, *args, **kwargs)

    return call


def _current_accelerator(other: torch.device | None, real: Any) -> Any:
    def current_accelerator() -> torch.device | None:
        current = real()
        unused = current is not None and current.type == NAME and not IN_USE.is_set()
        return other if unused else current

    return current_accelerator


def _any_accelerator(real: Any) -> Any:
    def any_accelerator(check: bool = False) -> torch.device:
        current = real(check)
        unused = current.type == NAME and not IN_USE.is_set()
        return (
            (torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")) if unused else current
        )

    return any_accelerator


def _tag(storage: Any) -> str | None:
    """The location that torch.save records for a storage."""
    return "moai:0" if storage.device.type == NAME else None


def _restore(storage: Any, location: str) -> Any:
    """The storage that torch.load makes for one saved on the device or mapped to it."""
    if not is_moai(location):
        return None
    from moaic.device import storages

    return storages.fill_from(storages.new(storage.nbytes()), storage)
