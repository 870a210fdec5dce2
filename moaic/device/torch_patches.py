"""Patches of torch functions that fail for a device implemented in Python, installed at its first use."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Final

import torch

from moaic.device import guard, torch_module, torch_private
from moaic.device.identity import NAME, is_moai

_ACCELERATOR: Final = {
    "synchronize": torch_module.synchronize,
    "get_device_capability": torch_module.get_device_capability,
}

_MEMORY: Final = {
    name: getattr(torch_module, name)
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
    _patch_accelerator()
    for point in torch_private.RUN_BACKWARD:
        point.patch(guard.raise_held)
    torch_private.PIN.patch(_pin)
    torch_private.PRINT.patch(_print)
    torch_private.PRINT_ELEMENTS.patch(_print_elements)
    torch_private.COMPILE_BY_DEFAULT.patch(_compile_by_default)
    torch_private.SCATTER.patch(_scatter)


def _patch_accelerator() -> None:
    for name, ours in (_ACCELERATOR | _MEMORY).items():
        for point in torch_private.accelerator_patch_points(name):
            point.patch(partial(_for_moai, ours))


def _for_moai(ours: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        current = torch.accelerator.current_accelerator()
        return (ours if current is not None and current.type == NAME else real)(*args, **kwargs)

    return call


def _pin(real: Any) -> Any:
    """Return a host tensor as it is: workers copy the data sent to them, so pinned memory has no benefit."""

    def pin_memory(self: Any, device: Any = None) -> Any:
        if self.device.type == NAME:
            raise RuntimeError("cannot pin a tensor on device moai: only tensors on the cpu can be pinned")
        if self.device.type != "cpu" or (device is not None and not is_moai(device)):
            return real(self, device)
        return real(self, "cuda") if torch_private.CUDA_IS_AVAILABLE() else self

    return pin_memory


def _print(real: Any) -> Any:
    """Release PyTorch's frames on an error: kept alive by a traceback, they make `torch.func.grad` give zeros."""

    def text(self: Any, **options: Any) -> str:
        try:
            return real(self, **options)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            raise

    return text


def _print_elements(real: Any) -> Any:
    """Fetch a tensor once to print it, instead of once per element."""

    def tensor_str(self: Any, indent: int) -> str:
        return real(self.detach().cpu() if self.device.type == NAME else self, indent)

    return tensor_str


def _compile_by_default(real: Any) -> Any:
    """Compile graphs with tensors of the device by backend `moai`; Inductor runs in the workers."""

    def compile_graph(self: Any, graph: Any, examples: Sequence[Any], **options: Any) -> Any:
        if any(isinstance(each, torch.Tensor) and each.device.type == NAME for each in examples):
            return torch_private.dynamo_backend(NAME)(graph, examples)
        return real(self, graph, examples, **options)

    return compile_graph


def _scatter(real: Any) -> Any:
    """Give the one device the whole batch: the accelerator shards it."""

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        if self.src_device_obj.type != NAME:
            return real(self, inputs, kwargs, device_ids)
        return (torch_private.moved(inputs, NAME),), (torch_private.moved(kwargs or {}, NAME),)

    return scatter
