"""Functions of torch that would fail for a device made in Python, taken over once the program uses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from moaic.device import face
from moaic.device.early import NAME

_ACCELERATOR: Final = {"synchronize": face.synchronize, "get_device_capability": face.get_device_capability}

_MEMORY: Final = {
    name: getattr(face, name)
    for name in (
        "empty_cache",
        "empty_host_cache",
        "get_memory_info",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    )
}


def install_in_use() -> None:
    """Called when the device starts."""
    _take_over_accelerator()
    _take_over_pinning()
    _take_over_printing()


def _take_over_accelerator() -> None:
    accelerator: Any = torch.accelerator
    for name, ours in (_ACCELERATOR | _MEMORY).items():
        wrapped = _for_moai(getattr(accelerator, name), ours)
        setattr(accelerator, name, wrapped)
        if name in _MEMORY:
            setattr(accelerator.memory, name, wrapped)


def _for_moai(real: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        current = torch.accelerator.current_accelerator()
        return (ours if current is not None and current.type == NAME else real)(*args, **kwargs)

    call.__name__, call.__doc__ = real.__name__, real.__doc__
    return call


def _take_over_pinning() -> None:
    """Workers copy what they are sent, so pinned memory would gain nothing: a host tensor stays as it is."""
    tensor: Any = torch.Tensor
    real = tensor.pin_memory

    def pin_memory(self: Any, device: Any = None) -> Any:
        if self.device.type == NAME:
            raise RuntimeError("cannot pin a tensor on device moai: only tensors on the cpu can be pinned")
        if device is not None or self.device.type != "cpu":
            return real(self, device)
        return real(self, "cuda") if torch.cuda.is_available() else self

    tensor.pin_memory = pin_memory


def _take_over_printing() -> None:
    """A tensor is fetched once to be printed, instead of once per element."""
    printer: Any = torch._tensor_str
    real = printer._tensor_str

    def _tensor_str(self: Any, indent: int) -> str:
        return real(self.detach().cpu() if self.device.type == NAME else self, indent)

    printer._tensor_str = _tensor_str
