"""What this host is, as it must be alike on all hosts of a job."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cores import cores, share_out
from moaic.runtime.host.gpus import usable
from moaic.runtime.host.version import VERSION as MOAIC
from moaic.runtime.protocol.host_messages import VERSION, HostFacts
from moaic.text.units import count

CPU_INFO: Final = Path("/proc/cpuinfo")

INSTRUCTION_SETS: Final = ("fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "sve", "bf16")
"""By which libraries choose other kernels, which add up in other orders."""


def facts() -> HostFacts:
    """Those of this host."""
    python = ".".join(platform.python_version_tuple()[:2])
    gpus = tuple(gpu.name for gpu in usable(os.environ))
    return HostFacts(VERSION, MOAIC, version("torch"), python, _cpu(), cores(), _triton(), gpus)


def check_alike(host: str, theirs: HostFacts, ours: HostFacts) -> None:
    """Raises Diagnostic for a host whose workers could not run, or would not give the same bits."""
    for difference in differences(host, theirs, ours):
        raise difference


def differences(host: str, theirs: HostFacts, ours: HostFacts) -> Iterator[Diagnostic]:
    """Why the workers of a host could not run, or would not give the same bits."""
    pairs = {
        "moaic": (theirs.moaic, ours.moaic),
        "moaic's protocol": (str(theirs.version), str(ours.version)),
        "PyTorch": (theirs.torch, ours.torch),
        "Python": (theirs.python, ours.python),
    }
    for name, (there, here) in pairs.items():
        if there != here:
            yield Diagnostic(f"host `{host}` has {name} {there}, this one {here}", hint=f"install the same {name}")
    if theirs.cpu != ours.cpu:
        yield Diagnostic(
            f"host `{host}` has another kind of CPU ({theirs.cpu}) than this one ({ours.cpu})",
            hint="list hosts of one kind: kernels for others round differently, and a plan would give other bits",
        )


def unlike_gpus(host: str, theirs: tuple[HostFacts, int], ours: tuple[HostFacts, int]) -> Iterator[Diagnostic]:
    """Why a host's workers cannot compute on its GPUs, or would not give the same bits.

    Each host comes with the number of GPUs that its workers need; 0 if they compute on cores.
    """
    (there, needed), (here, _) = theirs, ours
    if not needed:
        return
    if len(there.gpus) < needed:
        found = count(len(there.gpus), "GPU") if there.gpus else "no GPU"
        yield Diagnostic(
            f"host `{host}` has {found} for {count(needed, 'worker')}: each of another host needs one of its own",
            hint="set workers of this [[host]] in cluster.toml, or look at CUDA_VISIBLE_DEVICES and the driver there",
        )
    kinds, mine = (list(dict.fromkeys(each.gpus[:number])) for each, number in (theirs, ours))
    if len({*kinds, *mine}) > 1:
        yield Diagnostic(
            f"host `{host}` has {' and '.join(kinds)}, this one {' and '.join(mine)}: GPUs must be of one kind",
            hint="list hosts of one kind: programs are compiled for one, and other kernels round differently",
        )
    if there.triton != here.triton:
        yield Diagnostic(
            f"host `{host}` has Triton {there.triton or 'nowhere'}, this one {here.triton or 'nowhere'}",
            hint="install the same Triton: pip install 'moaic[gpu]'",
        )


def threads(facts: HostFacts, workers: int) -> int:
    """Those of each of so many workers of a host; of unequal ones, the least."""
    return min(share_out(facts.cores, workers))


def unequal_threads(host: str, theirs: tuple[HostFacts, int], ours: tuple[HostFacts, int]) -> str:
    """What follows from workers of a host with other numbers of threads than here; empty if they have the same.

    Each host comes with its number of workers.
    """
    there, here = threads(*theirs), threads(*ours)
    if there == here:
        return ""
    return (
        f"Workers of host {host} have {there} threads each, those of this one {here}: the last bits differ "
        "from those of equal workers, and all wait for the slowest. workers of [[host]] in cluster.toml sets this."
    )


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _cpu() -> str:
    text = CPU_INFO.read_text(encoding="ascii", errors="replace") if CPU_INFO.exists() else ""
    found = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split()
    return " ".join([platform.machine(), *(each for each in INSTRUCTION_SETS if each in found)])
