"""Memory of this host, and memory that a process uses."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Final

CONTROL_GROUP: Final = Path("/sys/fs/cgroup/memory.max")
GROUP_EVENTS: Final = Path("/sys/fs/cgroup/memory.events")

KIB: Final = 1024

USABLE: Final = 0.9
"""Share of a worker's memory that plans may use; the rest is for libraries, drivers and fragmentation."""


def host_bytes() -> int:
    """Bytes of memory: the physical memory, or the limit of this process's control group if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CONTROL_GROUP.read_text(encoding="ascii").strip() if CONTROL_GROUP.exists() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def data_limit() -> int | None:
    """The limit in bytes of a process's private memory, which workers inherit; None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if soft == resource.RLIM_INFINITY else soft


def data_bytes(process: int | str) -> int:
    """Bytes of private memory of a process, as RLIMIT_DATA counts them; 0 once it has ended."""
    return _field(Path(f"/proc/{process}/status"), "VmData:")


def proportional_bytes(process: int | str) -> int:
    """Bytes of a process, with shared pages counted by its share of them; 0 if the system does not report it."""
    return _field(Path(f"/proc/{process}/smaps_rollup"), "Pss:")


def free_bytes() -> int:
    """Bytes that this process can still allocate, by its limit and by the free memory of the host."""
    host = _field(Path("/proc/meminfo"), "MemAvailable:")
    most = data_limit()
    return host if most is None else max(0, min(host, most - data_bytes("self")))


def oom_kills() -> int:
    """The number of processes that the kernel's OOM killer has ended, in this control group or on this host."""
    for path in (GROUP_EVENTS, Path("/proc/vmstat")):
        if path.exists():
            lines = path.read_text(encoding="ascii").splitlines()
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def _field(path: Path, name: str) -> int:
    """The value of a line `name N kB` in bytes; 0 if there is none."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((KIB * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
