"""What must be in place before the device is used: each hook passes everything through that is not about `moai`.

Loaded by `import torch`, so it imports nothing of ours that is heavy; the work is done elsewhere.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, Final

import torch

NAME: Final = "moai"

IN_USE: Final = threading.Event()
"""Set when the program uses the device for the first time; until then torch must behave as if it were not installed."""


def is_moai(device: Any) -> bool:
    """Whether an argument called `device` names the virtual accelerator."""
    if isinstance(device, str):
        return device.split(":", maxsplit=1)[0] == NAME
    return isinstance(device, torch.device) and device.type == NAME


@cache
def install() -> None:
    """Put the hooks in place, once."""
    _hook_storages()
    _hook_modules()
    _hook_generators()
    _hook_accelerator()
    torch.serialization.register_package(9, _tag, _restore)


def _hook_storages() -> None:
    storage: Any = torch.UntypedStorage
    real_new, real_copy = storage.__new__, storage.copy_
    real_write, real_read = storage._write_file, storage._set_from_file

    def new(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_moai(kwargs.get("device")):
            return real_new(cls, *args, **kwargs)
        from moaic.device import storages

        return storages.new(args[0] if args else kwargs.get("size", 0))

    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        if self.device.type != NAME and source.device.type != NAME:
            return real_copy(self, source, bool(non_blocking))
        from moaic.device import storages

        if self.device.type == NAME:
            return storages.fill_from(self, source)
        return real_copy(self, storages.fetch(source), False)

    def _write_file(self: Any, *args: Any) -> Any:
        if self.device.type != NAME:
            return real_write(self, *args)
        from moaic.device import storages

        return real_write(storages.fetch(self), *args)

    def _set_from_file(self: Any, *args: Any) -> Any:
        if self.device.type != NAME:
            return real_read(self, *args)
        from moaic.device import storages

        host = torch.UntypedStorage(self.nbytes(), device="cpu")
        real_read(host, *args)
        return storages.fill_from(self, host)

    storage.__new__ = staticmethod(new)
    storage._set_from_file = _set_from_file
    storage._write_file = _write_file
    storage.copy_ = copy_


def _hook_modules() -> None:
    module: Any = torch.nn.Module
    real_apply = module._apply

    def _apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        from moaic.device.modules import Move

        return real_apply(self, fn if isinstance(fn, Move) else Move(fn), recurse)

    module._apply = _apply


def _hook_generators() -> None:
    meta: Any = type(torch.Generator)
    real_call = meta.__call__

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Generator and is_moai(args[0] if args else kwargs.get("device")):
            raise NotImplementedError(
                "device moai has no generator of its own: eager random ops draw from the CPU's, so use "
                "torch.Generator() for tensors on moai, or torch.manual_seed()"
            )
        return real_call(cls, *args, **kwargs)

    meta.__call__ = call


def _hook_accelerator() -> None:
    accelerator: Any = torch.accelerator
    real_current = accelerator.current_accelerator

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        found = real_current(check_available)
        unused = found is not None and found.type == NAME and not IN_USE.is_set()
        return None if unused else found

    current_accelerator.__doc__ = real_current.__doc__
    accelerator.current_accelerator = current_accelerator


def _tag(storage: Any) -> str | None:
    """What torch.save notes as the place of a storage."""
    return "moai:0" if storage.device.type == NAME else None


def _restore(storage: Any, location: str) -> Any:
    """What torch.load makes of a storage that was saved on the device or is mapped to it."""
    if not is_moai(location):
        return None
    from moaic.device import storages

    return storages.fill_from(storages.new(storage.nbytes()), storage)
