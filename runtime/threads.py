"""How many cores there are, how many workers they carry, and how they share them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic

MOST_WORKERS: Final = 8
"""Workers started when nobody says how many."""

QUOTA: Final = Path("/sys/fs/cgroup/cpu.max")


def cores() -> int:
    """Cores that this process may use, by affinity and by the quota of its control group; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = QUOTA.read_text(encoding="ascii").partition(" ") if QUOTA.exists() else ("max", "", "")
    if quota == "max":
        return allowed
    return max(1, min(allowed, int(quota) // int(period)))


def default_flavor(environment: Mapping[str, str]) -> int:
    """Number of workers: MOAI_FLAVOR where it is set, else one per core up to 8. Raises Diagnostic."""
    text = environment.get("MOAI_FLAVOR")
    if text is None:
        return min(cores(), MOST_WORKERS)
    if not text.isdecimal() or int(text) < 1:
        raise Diagnostic(
            f"MOAI_FLAVOR is the number of workers, a whole number from 1 on, not `{text}`",
            hint="unset it to get one worker per core",
        )
    return int(text)


def share_out(available: int, workers: int) -> tuple[int, ...]:
    """Threads of each worker: the cores dealt out, at least one each."""
    return tuple(max(1, available // workers + (i < available % workers)) for i in range(workers))
