"""Inductor's C++ kernels built in batches: kernels of many graphs by one run of the compiler on each thread.

Starting the compiler, reading headers (precompiled ones too) and linking cost several times as much as a usual kernel.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Final

import torch
from torch._inductor import async_compile, cpp_builder, cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile, get_compile_threads
from torch._inductor.codecache import CppPythonBindingsCodeCache

NAME: Final = CppPythonBindingsCodeCache.entry_function
"""Inductor's name of every kernel, and the symbol that it looks up in a library."""


@dataclass(frozen=True, slots=True)
class CppKernel:
    """A kernel to be built, and where the function is to be found then."""

    argtypes: Sequence[str]
    source: str


class Batch:
    """Kernels of several graphs' modules."""

    def __init__(self) -> None:
        self._kernels: list[tuple[dict[str, Any], str, CppKernel]] = []

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Collects the C++ kernels of all graphs that Inductor compiles inside, for `build`."""
        add = self._add

        class Together(AsyncCompile):
            def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
                return CppKernel(argtypes, source_code)

            def wait(self, scope: dict[str, Any]) -> None:
                add(scope)
                super().wait(scope)

        async_compile.AsyncCompile = Together
        try:
            yield
        finally:
            async_compile.AsyncCompile = AsyncCompile

    def _add(self, scope: dict[str, Any]) -> None:
        """Replaces the kernels in a module's namespace by the built ones."""
        self._kernels += [(scope, name, value) for name, value in scope.items() if isinstance(value, CppKernel)]

    def build(self) -> None:
        """Compiles and loads all kernels."""
        threads = get_compile_threads()
        parts = [part for thread in range(threads) if (part := self._kernels[thread::threads])]
        submit = AsyncCompile.submit if threads > 1 else None
        loading = [
            CppPythonBindingsCodeCache.load_async(_text([kernel for _, _, kernel in part]), submit_fn=submit)
            for part in parts
        ]
        for part, load in zip(parts, loading, strict=True):
            library = load()
            for number, (scope, name, _) in enumerate(part):
                scope[name] = _function(library, number)


def precompile_headers() -> None:
    """The part of a build that depends on no kernel."""
    CppPythonBindingsCodeCache.load_async("")


def _text(kernels: Sequence[CppKernel]) -> str:
    """One source file: each kernel under its own name, in a namespace for its definitions."""
    lines = [line for number, kernel in enumerate(kernels) for line in _section(number, kernel).splitlines()]
    includes = dict.fromkeys(line.strip() for line in lines if line.lstrip().startswith("#include"))
    return "\n".join([*includes, *(line for line in lines if line.strip() not in includes)])


def _section(number: int, kernel: CppKernel) -> str:
    name = _name(number)
    arguments = [f"parse_arg<{kind.replace('const ', '')}>(args, {n})" for n, kind in enumerate(kernel.argtypes)]
    bindings = CppPythonBindingsCodeCache.suffix_template.format(
        arg_len=len(arguments),
        call_entry_func=f"{name}({', '.join(arguments)}); Py_RETURN_NONE;",
        entry_func=name,
        extra_parse_arg="",
    )
    return f"namespace n{number} {{\n#define {NAME} {name}\n{kernel.source}\n#undef {NAME}\n{bindings}\n}}"


def _name(number: int) -> str:
    return f"{NAME}_{number}" if number else NAME


def _function(library: Any, number: int) -> Any:
    """A kernel of a library; each has the entry point of a Python module."""
    if number == 0:
        return library.kernel
    name = _name(number)
    spec = spec_from_file_location(f"{library.key}.{name}", library.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


class _Avx512(cpu_vec_isa.VecAVX512):
    def __bool__(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return True


class _Avx2(cpu_vec_isa.VecAVX2):
    def __bool__(self) -> bool:
        return True


_search: Final = cpu_vec_isa.valid_vec_isa_list


@cache
def _instruction_sets() -> list[cpu_vec_isa.VecISA]:
    """The instruction set of PyTorch's own kernels if it is known; else those that Inductor detects by trial builds."""
    known = {"AVX512": _Avx512, "AVX2": _Avx2}.get(torch.backends.cpu.get_cpu_capability())
    return [known()] if known else _search()


cpu_vec_isa.valid_vec_isa_list = _instruction_sets

_run_compiler: Final = cpp_builder.run_compile_cmd


def _build_whole(command: str, cwd: str) -> None:
    """Runs a compiler whose output gets its name when it is complete.

    Compilers are killed with the program, and every later program would find the half of a library and fail to load it.
    """
    words = shlex.split(command)
    if "-o" not in words:
        _run_compiler(command, cwd)
        return
    place = words.index("-o") + 1
    target = Path(cwd, words[place])
    unfinished = target.with_name(f"{os.getpid()}-{target.name}")
    words[place] = str(unfinished)
    _run_compiler(shlex.join(words), cwd)
    unfinished.replace(target)


cpp_builder.run_compile_cmd = _build_whole
