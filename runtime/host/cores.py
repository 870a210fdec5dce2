"""The number of cores, and the share of each worker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """The number of cores that affinity and the quota of the control group let this process use; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = QUOTA.read_text(encoding="ascii").partition(" ") if QUOTA.exists() else ("max", "", "")
    if quota == "max":
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def share_out(available: int, workers: int) -> tuple[int, ...]:
    """The number of threads of each worker: an equal share of the cores, at least one."""
    return tuple(max(1, available // workers + (i < available % workers)) for i in range(workers))
