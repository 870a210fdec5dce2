"""What this host is, as it must be alike on all hosts of a job."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cores import cores
from moaic.runtime.host.version import VERSION as MOAIC
from moaic.runtime.protocol.host_messages import VERSION, HostFacts

CPU_INFO: Final = Path("/proc/cpuinfo")

INSTRUCTION_SETS: Final = ("fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "sve", "bf16")
"""By which libraries choose other kernels, which add up in other orders."""


def facts() -> HostFacts:
    """Those of this host."""
    python = ".".join(platform.python_version_tuple()[:2])
    return HostFacts(VERSION, MOAIC, version("torch"), python, _cpu(), cores())


def check_alike(host: str, theirs: HostFacts, ours: HostFacts) -> None:
    """Raises Diagnostic for a host whose workers could not run, or would not give the same bits."""
    pairs = {
        "moaic": (theirs.moaic, ours.moaic),
        "moaic's protocol": (str(theirs.version), str(ours.version)),
        "PyTorch": (theirs.torch, ours.torch),
        "Python": (theirs.python, ours.python),
    }
    for name, (there, here) in pairs.items():
        if there != here:
            raise Diagnostic(f"host `{host}` has {name} {there}, this one {here}", hint=f"install the same {name}")
    if theirs.cpu != ours.cpu:
        raise Diagnostic(
            f"host `{host}` has another kind of CPU ({theirs.cpu}) than this one ({ours.cpu})",
            hint="list hosts of one kind: kernels for others round differently, and a plan would give other bits",
        )


def _cpu() -> str:
    text = CPU_INFO.read_text(encoding="ascii", errors="replace") if CPU_INFO.exists() else ""
    found = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split()
    return " ".join([platform.machine(), *(each for each in INSTRUCTION_SETS if each in found)])
