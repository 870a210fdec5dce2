"""How many cores there are, and how workers share them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Cores that this process may use, by affinity and by the quota of its control group; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = QUOTA.read_text(encoding="ascii").partition(" ") if QUOTA.exists() else ("max", "", "")
    if quota == "max":
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def share_out(available: int, workers: int) -> tuple[int, ...]:
    """Threads of each worker: the cores dealt out, at least one each."""
    return tuple(max(1, available // workers + (i < available % workers)) for i in range(workers))
