"""`torch.cuda` in the mode: names with a meaning for the accelerator are mapped to it, the others raise Diagnostic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch

from moaic.device import torch_module
from moaic.device.torch_private import CUDA_INIT, NAME, PatchPoint
from moaic.ir.errors import Diagnostic
from moaic.option.devices import DEVICE, translated
from moaic.option.mapping import Mapping, always

SAME_AS_MOAI: Final = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "empty_cache",
    "get_device_name",
    "get_rng_state",
    "get_rng_state_all",
    "init",
    "initial_seed",
    "is_bf16_supported",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "stream",
    "synchronize",
)
"""Names with the same meaning in `torch.moai`."""

OLD_NAMES: Final = {
    "max_memory_cached": "max_memory_reserved",
    "memory_cached": "memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
}
"""Deprecated names of `torch.cuda`, with the name in `torch.moai`."""

KEPT: Final = (
    "CudaError",
    "DeferredCudaCallError",
    "StreamContext",
    "amp",
    "check_error",
    "cudaStatus",
    "graphs",
    "has_half",
    "has_magma",
    "jiterator",
    "memory",
    "nccl",
    "nvtx",
    "profiler",
    "random",
    "sparse",
    "streams",
    "tunable",
    "cudart",
)
"""Exceptions, constants and modules, which stay; their use of CUDA ends in `_lazy_init`, which is mapped."""

ADVICE: Final = {
    "CUDAGraph": "leave it out: a step is one message to the workers already",
    "graph": "leave it out: a step is one message to the workers already",
    "make_graphed_callables": "leave it out: a step is one message to the workers already",
    "list_gpu_processes": "`moai-smi` shows the accelerator's processes",
    "memory_snapshot": "`torch.cuda.memory_stats()` has the sums, `moai-smi -p` the workers",
    "memory_usage": "`moai-smi` shows how busy the accelerator is",
    "power_draw": "`moai-smi -p` shows the workers",
    "set_per_process_memory_fraction": "choose a smaller flavor with `moai-switch-model`",
    "temperature": "`moai-smi -p` shows the workers",
    "utilization": "`moai-smi` shows how busy the accelerator is",
}
"""Hints for names of `torch.cuda` that are refused."""

_TYPES: Final = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The result of `torch.cuda.get_device_properties` for the accelerator; memory in bytes."""

    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int


@dataclass(frozen=True, slots=True)
class LegacyTensorType:
    """`torch.cuda.FloatTensor` and similar: a constructor of tensors, and a type for `isinstance`."""

    dtype: torch.dtype

    def __call__(self, *data: Any) -> torch.Tensor:
        if data and all(isinstance(size, int) for size in data):
            return torch.empty(data, dtype=self.dtype, device=DEVICE)
        return torch.tensor(*(data or ([],)), dtype=self.dtype, device=DEVICE)

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == NAME and value.dtype == self.dtype


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Always 8.0, the first capability with bfloat16, so that programs use that and no newer feature."""
    torch_module.device(device)
    return 8, 0


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Properties of the accelerator, with one processor however many workers there are."""
    major, minor = get_device_capability(device)
    return DeviceProperties(
        torch_module.get_device_name(device), torch_module.get_memory_info(device)[1], major, minor, 1
    )


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    """The counts of `torch.cuda.memory_stats`, one a line."""
    return "\n".join(f"{name:40} {value:>20,}" for name, value in torch_module.memory_stats(device).items())


def is_available() -> bool:
    return True


def _false(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    """Does nothing."""


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _empty(*_: Any) -> list[str]:
    return []


OWN: Final[dict[str, tuple[Any, str]]] = {
    "can_device_access_peer": (_false, "False: there is one device"),
    "default_generators": ((torch.default_generator,), "the CPU's generator, from which the accelerator draws"),
    "get_arch_list": (_empty, "an empty list"),
    "get_device_capability": (get_device_capability, "(8, 0), the first with bfloat16"),
    "get_device_properties": (get_device_properties, "name, memory and capability of the accelerator"),
    "ipc_collect": (_nothing, "nothing to do"),
    "is_available": (is_available, "True"),
    "is_current_stream_capturing": (_false, "False: there are no CUDA graphs"),
    "is_tf32_supported": (_false, "False: float32 is float32"),
    "memory_summary": (memory_summary, "the accelerator's counts as text"),
}
"""Names that only `torch.cuda` has: replacement, and meaning for the documentation."""


def mappings() -> Iterator[Mapping]:
    """Mappings of every public name of `torch.cuda` and of `_lazy_init` behind them."""
    for name in SAME_AS_MOAI:
        yield from _mapped(name, getattr(torch_module, name), "the same of `torch.moai`")
    for name, ours in OLD_NAMES.items():
        yield from _mapped(name, getattr(torch_module, ours), f"`torch.moai.{ours}`")
    for name, (ours, meaning) in OWN.items():
        yield from _mapped(name, ours, meaning)
    for name, dtype in _TYPES.items():
        yield from _mapped(f"{name}Tensor", LegacyTensorType(dtype), "tensors of its type on the accelerator")
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        point = PatchPoint(torch.cuda.nvtx, name)
        yield Mapping(
            f"torch.cuda.nvtx.{name}", "does nothing: NVIDIA's tools see no accelerator", point, always(_zero)
        )
    for name in refused():
        yield from _mapped(name, _refused(name), "raises, with a way out")
    yield Mapping(
        "torch.cuda._lazy_init",
        "raises what to do: nothing may start CUDA itself",
        CUDA_INIT,
        always(_refusal("CUDA itself", _BOUND_EARLY)),
    )
    yield Mapping(
        "torch.moai._check", "`cuda` names the accelerator too", PatchPoint(torch_module, "_check"), _checking
    )


_BOUND_EARLY: Final = (
    "a function that was imported by its own name (`from torch import zeros`) before the mode was on is not mapped: "
    "call it as `torch.zeros`, or set MOAI_ENABLE_ADVANCED_PARALLELIZATION=1 instead of the line"
)


def refused() -> list[str]:
    """Public names of `torch.cuda` that have no meaning on the accelerator."""
    known = {*SAME_AS_MOAI, *OLD_NAMES, *OWN, *KEPT, *(f"{name}Tensor" for name in _TYPES)}
    return [name for name in torch.cuda.__all__ if name not in known]


def _mapped(name: str, ours: Any, meaning: str) -> Iterator[Mapping]:
    """Mappings of one name, in `torch.cuda` and in those of its modules that hold the same object."""
    shown = getattr(torch.cuda, name, None)
    if shown is None:
        return
    yield Mapping(f"torch.cuda.{name}", meaning, PatchPoint(torch.cuda, name), always(ours))
    for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        if vars(module).get(name) is shown:
            call = f"{module.__name__}.{name}"
            yield Mapping(call, meaning, PatchPoint(module, name), always(ours))


def _refused(name: str) -> Any:
    """The replacement of a refused name; a class stays a class, for annotations and `isinstance`."""
    refusal: Any = _refusal(f"torch.cuda.{name}", ADVICE.get(name))
    real: Any = getattr(torch.cuda, name, None)
    if isinstance(real, type):
        return type(name, (), {"__new__": refusal})
    if hasattr(real, "__wrapped__"):
        # Dynamo unwraps the decorators of PyTorch and expects this attribute.
        refusal.__wrapped__ = real.__wrapped__
    return refusal


def _refusal(call: str, advice: str | None) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise Diagnostic(
            f"{call} is not available: `cuda` is the virtual accelerator in this program",
            hint=advice
            or "leave the call out, or switch off with torch.moai.option.disable_advanced_parallelization()",
        )

    return refuse


def _checking(real: Callable[[Any], int]) -> Callable[[Any], int]:
    def check(device: Any) -> int:
        return real(translated(device))

    return check
