"""PyTorch made to believe in a GPU that is not here: Inductor compiles for it, and what it writes runs on the host.

This is the only place that does so for a whole process. All of it is private to PyTorch and Triton, so names are looked
up first, and a version that lacks one is reported.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Final

import torch

from moaic.runtime.codegen.device_guard import register_device_guard
from moaic.runtime.codegen.gpu_answers import always, check_names, decompositions, gpu_answers, settings
from moaic.runtime.emulation.library_kernels import register_kernels
from moaic.runtime.emulation.triton_interpreter import complete
from moaic.runtime.host.gpu_specs import Target
from moaic.runtime.host.worker_kinds import INTERPRETED
from moaic.runtime.kernels import triton_launch

NEEDED: Final = (
    "torch._C._dynamo.guards:_empty_strided_cpu",
    "torch._inductor.runtime.triton_heuristics:CachingAutotuner._interpret_args_grid",
    "torch.library:get_kernel",
    "torch.utils._python_dispatch:_disable_current_modes",
    "triton.runtime.interpreter:GridExecutor.__call__",
    "triton.runtime.interpreter:InterpreterBuilder.create_extern_elementwise",
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_load",
    "triton.runtime.interpreter:InterpreterBuilder.create_masked_store",
    "triton.runtime.interpreter:InterpreterBuilder.create_atomic_rmw",
    "triton.runtime.interpreter:InterpreterBuilder.create_atomic_cas",
    "triton.runtime.interpreter:InterpreterBuilder.cast_impl",
    "triton.runtime.interpreter:InterpreterBuilder.binary_op",
    "triton.runtime.interpreter:ReduceOps.apply_impl",
    "triton.runtime.interpreter:ScanOps.apply_impl",
    "triton.runtime.interpreter:_patch_lang",
    "triton.runtime.interpreter:interpreter_semantic",
    "triton.language.extra.cuda:libdevice",
    "triton.language.extra.hip:libdevice",
)


def emulate(target: Target) -> None:
    """From now on, in this process, functions for `cuda:0` are compiled for `target` and run on tensors of the host.

    Raises Diagnostic where PyTorch or Triton are not as they are known here.
    """
    assert os.environ.get(INTERPRETED) == "1", f"{INTERPRETED}=1 must be set before Triton is imported"
    check_names(NEEDED)
    register_device_guard()
    for owner, name, answer in (*gpu_answers(target), *_on_the_host()):
        setattr(owner, name, answer)
    config: Any = importlib.import_module("torch._inductor.config")
    for name, value in settings().items():
        setattr(config, name, value)
    table: Any = importlib.import_module("torch._decomp")
    table.decomposition_table.update(decompositions())
    compiler: Any = torch.compiler.config
    compiler.cache_key_tag = f"{compiler.cache_key_tag}emulated"
    complete(target.backend)
    _KEPT.append(register_kernels())


_KEPT: Final = list[Any]()
"""Registrations end with what stands for them."""


def _on_the_host() -> tuple[tuple[Any, str, Any], ...]:
    """What the functions that Inductor writes call to make memory and to launch kernels."""
    from torch._inductor.runtime import triton_helpers

    core: Any = importlib.import_module("torch._C")
    guards: Any = core._dynamo.guards
    nothing: Callable[..., Any] = always(None)
    return (
        (guards, "_empty_strided_cuda", guards._empty_strided_cpu),
        (core, "_cuda_getCurrentRawStream", always(0)),
        (torch.cuda, "_DeviceGuard", always(nullcontext())),
        (torch.cuda, "set_device", nothing),
        (torch.cuda, "synchronize", nothing),
        (triton_helpers, "set_driver_to_gpu", nothing),
        (triton_launch, "runs_kernels", always(True)),
    )
