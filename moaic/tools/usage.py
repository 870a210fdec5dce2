"""What processes take of this host now, read from the system without disturbing them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

SAMPLE_SECONDS = 0.06
"""How long processes are watched for the share of time that they compute."""


def cpu_shares(pids: Sequence[int]) -> dict[int, float]:
    """How many cores' worth of computing each process does; watches them for a moment."""
    start, before = time.perf_counter(), {pid: _cpu_seconds(pid) for pid in pids}
    if pids:
        time.sleep(SAMPLE_SECONDS)
    after = {pid: _cpu_seconds(pid) for pid in pids}
    spent = max(time.perf_counter() - start, 1e-9)
    return {pid: max(0.0, after[pid] - before[pid]) / spent for pid in pids}


def memory(pids: Sequence[int]) -> dict[int, int]:
    """Bytes of each of a job's workers, as the system counts them anyway: exact sums would hold the workers up.

    What the workers have from the process that they were forked from, they share; so it is divided among them.
    """
    counts = {pid: _resident(pid) for pid in pids}
    parents = {count["PPid"] for count in counts.values() if "PPid" in count}
    inherited = _resident(parents.pop()).get("RssAnon", 0) if len(parents) == 1 else 0
    found: dict[int, int] = {}
    for pid, count in counts.items():
        own = max(0, count.get("RssAnon", 0) - inherited) + count.get("RssShmem", 0)
        found[pid] = own + inherited // len(pids) if count else 0
    return found


def is_worker(pid: int) -> bool:
    """Whether a process is a worker still, and not one that has got its number since."""
    try:
        return b"moaic.runtime.worker.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def temperature() -> float | None:
    """Degrees Celsius of the processor; None where the system does not say."""
    for name in Path("/sys/class/hwmon").glob("hwmon*/name"):
        if name.read_text(encoding="ascii").strip() in ("coretemp", "k10temp", "cpu_thermal"):
            readings = [int(path.read_text(encoding="ascii")) for path in name.parent.glob("temp*_input")]
            return max(readings) / 1000 if readings else None
    return None


def _resident(pid: int) -> dict[str, int]:
    """Bytes of private and of shared memory of a process, and its parent; nothing once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    words = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    numbers = {name: 1024 * int(words[name][0]) for name in ("RssAnon", "RssShmem") if name in words}
    return {**numbers, "PPid": int(words["PPid"][0])}


def _cpu_seconds(pid: int) -> float:
    """Time that the threads of a process have computed."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="ascii").split()[0])
        except OSError:
            continue  # the thread has ended
    return total / 1e9
