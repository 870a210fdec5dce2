"""The usable GPUs of this host, enumerated without creating a CUDA context: a process that has one must not fork.

GPUs of NVIDIA are enumerated by the driver's management library (NVML), those of AMD by files under /sys. PyTorch is
not imported: its file `version.py` states which of them it was built for.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

CPU: Final = "cpu"
"""The device of a worker that computes on cores of the host. The device of a worker with a GPU is `cuda:N`."""

NVML: Final = "libnvidia-ml.so.1"

KFD: Final = Path("/sys/class/kfd/kfd/topology/nodes")

VISIBLE: Final[Mapping[str, tuple[str, ...]]] = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "hip": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
}
"""GPU-visibility variables by PyTorch's platform; the first that is set counts."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU of this host, and its memory in bytes."""

    name: str
    memory: int
    arch: str
    """The compiler's name of the architecture: `sm_90`, `gfx942`."""

    @property
    def has_float8(self) -> bool:
        """Whether it has products of eight-bit floats: NVIDIA's from Ada on, AMD's from MI300 on."""
        if self.arch.startswith("sm_"):
            return int(self.arch.removeprefix("sm_")) >= 89
        return self.arch in ("gfx942", "gfx950")


def usable(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs of the platform that PyTorch was built for, as far as the environment makes them visible."""
    built = built_for()
    if not built:
        return []
    found = nvidia() if built == "cuda" else amd()
    chosen = chosen_of(environment.get(variable(built, environment)))
    return found if chosen is None else _chosen(found, chosen)


def built_for() -> str:
    """The platform that PyTorch was built for: `cuda`, `hip`, or the empty string for CPUs alone."""
    spec = find_spec("torch")
    path = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path is not None and path.exists() else ""
    lines = re.findall(r"^(cuda|hip)\b[^=]*= *['\"]", text, re.MULTILINE)
    return next((name for name in ("hip", "cuda") if name in lines), "")


def narrowed(index: int, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables with which a process sees only the usable GPU of this index.

    None for AMD's: unlike NCCL, RCCL does not use a direct link to a GPU that the process does not see.
    """
    built = built_for()
    if built == "hip":
        return {}
    name = variable(built, environment)
    chosen = chosen_of(environment.get(name))
    return {name: str(index) if chosen is None else chosen[index]}


def variable(built: str, environment: Mapping[str, str]) -> str:
    """The visibility variable of a platform that counts in this environment."""
    names = VISIBLE.get(built, VISIBLE["cuda"])
    return next((name for name in names if name in environment), names[0])


def chosen_of(text: str | None) -> list[str] | None:
    """The indices and names in the value of a visibility variable, in order; None if it is not set."""
    return None if text is None else [word.strip() for word in text.split(",")]


def _chosen(found: Sequence[Gpu], words: Sequence[str]) -> list[Gpu]:
    """The GPUs that the words name. As in the driver, the first word that names none ends the list."""
    chosen: list[Gpu] = []
    for word in words:
        if word.isdecimal() and int(word) < len(found):
            chosen.append(found[int(word)])
        elif word.startswith(("GPU-", "MIG-")) and found:
            # The index behind such a name is not known here; the GPUs are assumed to be equal.
            chosen.append(found[0])
        else:
            break
    return chosen


def nvidia(library: str = NVML) -> list[Gpu]:
    """All GPUs of NVIDIA that the driver shows to this host or container."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return []
    if nvml.nvmlInit_v2():
        return []
    try:
        count = ctypes.c_uint()
        return [] if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else _each(nvml, count.value)
    finally:
        nvml.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _each(nvml: Any, count: int) -> list[Gpu]:
    found: list[Gpu] = []
    for index in range(count):
        handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(96)
        major, minor = ctypes.c_int(), ctypes.c_int()
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        failed = failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        if failed or nvml.nvmlDeviceGetName(handle, name, len(name)):
            break
        found.append(Gpu(name.value.decode(), memory.total, f"sm_{major.value}{minor.value}"))
    return found


def amd(nodes: Path = KFD) -> list[Gpu]:
    """All GPUs of AMD that the kernel driver shows, in its order."""
    found: list[Gpu] = []
    for node in sorted(nodes.glob("[0-9]*"), key=lambda path: int(path.name)):
        facts = _facts(node / "properties")
        if facts.get("simd_count"):
            banks = [_facts(path) for path in node.glob("mem_banks/*/properties")]
            version = facts.get("gfx_target_version", 0)
            arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
            found.append(Gpu(f"AMD {arch}", sum(bank.get("size_in_bytes", 0) for bank in banks), arch))
    return found


def _facts(path: Path) -> dict[str, int]:
    """The numbers of a file with a line `name number` each."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[1].isdecimal()}
