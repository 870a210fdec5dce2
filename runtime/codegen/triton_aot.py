"""Triton kernels, Inductor's or our own, compiled ahead of time for a GPU, and the compiler's figures of each."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from moaic.runtime.host.gpu_specs import Target
from moaic.runtime.kernels.triton_launch import LAUNCH_SETTINGS


@dataclass(frozen=True, slots=True)
class Binary:
    """One kernel as the GPU runs it."""

    code: bytes
    """A cubin or an hsaco."""
    registers: int
    """Registers of each thread."""
    shared: int
    """Bytes of a block."""
    spills: int
    """Registers of a thread that went to memory (AMD), or bytes of them (NVIDIA)."""
    text: str
    """Triton's last text that is in the same words for all GPUs: it says which thread has which elements."""


def compiled(name: str, source: str, target: Target) -> Binary:
    """Compiles the kernel `name`, in the first of Inductor's configurations that spills nothing, else in the first.

    Which of them is the fastest, only the GPU can say.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers, triton_heuristics

    # With both replaced, Triton neither looks for a driver nor loads the binary.
    launcher = triton_heuristics.StaticTritonCompileResult
    with (
        mock.patch.object(triton_helpers, "set_driver_to_gpu"),
        mock.patch.object(launcher, "can_statically_launch", return_value=None),
    ):
        kernel: Any = getattr(PyCodeCache.load(source), name)
        first: Binary | None = None
        for config in kernel.configs:
            binary = _binary(kernel._precompile_config(config).kernel, target)
            if not binary.spills:
                return binary
            first = first or binary
    assert first is not None, f"{name} has no configuration"
    return first


def ahead(function: Any, types: Mapping[str, str], constants: Mapping[str, Any], target: Target, warps: int) -> Binary:
    """Compiles a Triton function for one launch, whose pointers and integers are multiples of 16, as most are.

    `types` are by parameter, in Triton's words (`*bf16`, `i32`); a parameter without a type is a constant.
    """
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    names: Sequence[str] = function.arg_names
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types.get(name, "fp")[0] in "*i"}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = compiler.ASTSource(function, signature, dict(constants), aligned)
    where = backends.GPUTarget(target.backend, target.arch, target.warp)
    return _binary(compiler.compile(source, where, {**LAUNCH_SETTINGS, "num_warps": warps}), target)


def _binary(made: Any, target: Target) -> Binary:
    code: bytes = made.asm[target.suffix]
    registers, spills = _nvidia(made.asm["ptx"], target.arch) if target.backend == "cuda" else _amd(made.asm["amdgcn"])
    return Binary(code, registers, int(made.metadata.shared), spills, made.asm["ttgir"])


def _nvidia(ptx: str, arch: Any) -> tuple[int, int]:
    """The output of the assembler that Triton brings for this GPU: `Used 32 registers`, `8 bytes spill stores`."""
    maker: Any = importlib.import_module("triton.backends.nvidia.compiler")
    wanted = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert wanted is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "kernel.ptx"
        text.write_text(ptx, encoding="utf-8")
        command = [maker.get_ptxas(arch).path, "-v", f"--gpu-name={wanted[1]}", str(text), "-o", f"{text}.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return _number(r"Used (\d+) registers", said), _number(r"(\d+) bytes spill stores", said)


def _amd(assembly: str) -> tuple[int, int]:
    """The figures in the comments of the assembly."""
    registers = _number(r"\.vgpr_count:\s+(\d+)", assembly)
    return registers, _number(r"\.vgpr_spill_count:\s+(\d+)", assembly)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"the compiler does not say {pattern}"
    return int(found[1])
