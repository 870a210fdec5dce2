"""Translation of "cuda" to the virtual accelerator, in every form in which a call takes a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch

from moaic.device.handles import DEVICE
from moaic.device.torch_private import NAME
from moaic.ir.errors import Diagnostic

CUDA: Final = "cuda"


def translated(device: Any) -> Any:
    """The accelerator for a CUDA device; any other value unchanged. Simple code, as Dynamo traces it."""
    if isinstance(device, str):
        if device != CUDA and device[:5] != "cuda:":
            return device
        device = torch.device(device)
    elif not isinstance(device, torch.device) or device.type != CUDA:
        return device
    return the_device(device.index)


def the_device(index: int | None) -> torch.device:
    """The accelerator, by its index; raises Diagnostic for any other than the first."""
    if index is not None and index != 0:
        raise Diagnostic(
            f"there is no device cuda:{index}: all devices of this program are one accelerator, cuda:0",
            hint="leave the index out; how much the accelerator holds is chosen by its flavor",
        )
    return DEVICE


def keyword(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that takes the keyword `device`; drops `pin_memory`, as workers copy their input."""

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = translated(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return real(*args, **kwargs)

    return call


def first(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method that takes a device as its first argument, or by keyword."""

    @wraps(real)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            return real(self, translated(args[0]), *args[1:], **kwargs)
        if "device" in kwargs:
            kwargs["device"] = translated(kwargs["device"])
        return real(self, **kwargs)

    return call


def device_type(real: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function that takes a device type, first or by keyword, with CUDA as the default."""

    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device_type" in kwargs:
            return real(*args, **{**kwargs, "device_type": type_of(kwargs["device_type"])})
        if args and isinstance(args[0], str):
            return real(type_of(args[0]), *args[1:], **kwargs)
        return real(NAME, *args, **kwargs)

    return call


def type_of(kind: str) -> str:
    """The accelerator's type for "cuda" or "cuda:0"; any other unchanged."""
    return NAME if translated(kind) is DEVICE else kind
