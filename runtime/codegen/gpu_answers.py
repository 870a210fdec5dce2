"""What PyTorch's compiler asks of a GPU, answered from the table of specifications for one that is not here.

The answers replace functions of PyTorch that are private to it, so names are looked up first.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.gpu_specs import Target

Answer = tuple[Any, str, Any]
"""A module or class, the name of a function in it, and the function that takes its place."""


def check_names(paths: Iterable[str]) -> None:
    """Raises Diagnostic if PyTorch or Triton lack one of these names, each as `module:name`."""
    try:
        importlib.import_module("triton")
    except ImportError:
        raise Diagnostic(
            "kernels for GPUs are compiled by Triton, which is not installed", hint="pip install 'moaic[gpu]'"
        ) from None
    for path in paths:
        module, _, names = path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for name in names.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            raise Diagnostic(
                f"PyTorch {torch.__version__} has no {module}.{names}, by which kernels are made for GPUs that are "
                "not here",
                hint="take a version of PyTorch between 2.11 and 2.15",
            ) from None


def gpu_answers(target: Target) -> tuple[Answer, ...]:
    """All that Inductor asks to compile for `target`."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    core: Any = importlib.import_module("torch._C")
    runtime: Any = importlib.import_module("triton.runtime")
    capability = divmod(target.arch, 10) if isinstance(target.arch, int) else (9, 0)
    return (
        (DeviceProperties, "create", always(_properties(target))),
        (torch.cuda, "get_device_properties", always(_as_torch_has_it(target, capability))),
        (torch.cuda, "get_device_capability", always(capability)),
        (torch.cuda, "current_device", always(0)),
        (CudaInterface, "is_bf16_supported", always(True)),
        (torch.version, "hip", "7.0" if target.backend == "hip" else None),
        (scheduler, "has_triton", always(True)),
        (_triton, "triton_hash_with_backend", always(target.name)),
        (core, "_conv_determine_backend_memory_format", _memory_format),
        (runtime.driver, "_active", _driver(target)),
    )


def decompositions() -> Mapping[Any, Any]:
    """Entries of PyTorch's table that would make a real device the current one, without what does that."""
    return {torch.ops.aten._unsafe_masked_index_put_accumulate.default: _masked_put}


def settings() -> Mapping[str, object]:
    """Settings of Inductor with which it asks nothing of the device itself."""
    # Constants would be folded on the device.
    return {"joint_graph_constant_folding": False, "cpp_wrapper": False}


def always(answer: object) -> Callable[..., Any]:
    return lambda *_args, **_named: answer


def _masked_put(x: Any, mask: Any, indices: Any, values: Any) -> Any:
    kept = torch.ops.aten.where.ScalarOther(mask, values, 0)
    return torch.ops.aten._unsafe_index_put(x, indices, kept, accumulate=True)


def _memory_format(x: Tensor, weight: Tensor, backend: object) -> torch.memory_format:
    """Of the result of a convolution by cuDNN or MIOpen, which a PyTorch without them does not know."""
    last = torch.channels_last if weight.dim() == 4 else torch.channels_last_3d
    operands = (x, weight)
    return last if any(has_channels_last(each) for each in operands) else torch.contiguous_format


def has_channels_last(x: Tensor) -> bool:
    """Whether the memory of a tensor has the channels last, and not also in their place."""
    if x.dim() not in (4, 5):
        return False
    last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return x.is_contiguous(memory_format=last) and not x.is_contiguous()


def _driver(target: Target) -> Any:
    compiler: Any = importlib.import_module("triton.backends.compiler")
    described = compiler.GPUTarget(target.backend, target.arch, target.warp)
    return SimpleNamespace(get_current_target=always(described))


def _properties(target: Target) -> Any:
    from torch._inductor.runtime.hints import DeviceProperties

    return DeviceProperties(
        type=target.backend,
        index=0,
        multi_processor_count=target.multiprocessors,
        cc=target.arch,  # pyright: ignore[reportArgumentType] AMD's is a word
        major=target.arch // 10 if isinstance(target.arch, int) else 9,
        regs_per_multiprocessor=target.registers,
        max_threads_per_multi_processor=target.threads,
        max_threads_per_block=1024,
        warp_size=target.warp,
    )


def _as_torch_has_it(target: Target, capability: tuple[int, int]) -> Any:
    return SimpleNamespace(
        name=target.device,
        major=capability[0],
        minor=capability[1],
        gcnArchName=str(target.arch),
        multi_processor_count=target.multiprocessors,
        regs_per_multiprocessor=target.registers,
        max_threads_per_multi_processor=target.threads,
        warp_size=target.warp,
        shared_memory_per_block_optin=target.shared,
        total_memory=target.memory,
    )
