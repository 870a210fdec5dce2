"""A device guard for `cuda` in a PyTorch for CPUs, which has none, so that methods of fake tensors work there.

Methods such as `contiguous` and indexing make the device of their tensor the current one first. PyTorch registers a
guard that does nothing where it is built for CUDA and there is no GPU, but not where it is built for CPUs alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar registrar(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""


@cache
def register_device_guard() -> None:
    """Compiles it once, into Inductor's cache, and registers it. Raises CalledProcessError if it does not compile."""
    if torch.version.cuda or torch.version.hip:
        return
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    key = hashlib.sha256(f"{SOURCE}{torch.__version__}".encode()).hexdigest()[:16]
    library = Path(cache_dir()) / f"cuda_guard_{key}.so"
    if not library.exists():
        _compile(library)
    ctypes.CDLL(str(library))


def _compile(library: Path) -> None:
    """In a folder beside its place: another process may compile it at the same time."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils.cpp_extension import include_paths

    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        source, made = Path(folder) / "guard.cpp", Path(folder) / library.name
        source.write_text(SOURCE, encoding="utf-8")
        links = [f"-L{Path(torch.__file__).with_name('lib')}", "-lc10"]
        includes = [f"-I{path}" for path in include_paths()]
        flags = [
            "-shared",
            "-fPIC",
            "-std=c++20",
            "-w",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        ]
        command = [get_cpp_compiler(), *flags, *includes, str(source), *links, "-o", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        made.replace(library)
