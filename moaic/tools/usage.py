"""CPU time, memory and temperature of processes on this host, read from the system without disturbing them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

SAMPLE_SECONDS = 0.06
"""Seconds for which processes are sampled."""


def cpu_shares(pids: Sequence[int]) -> dict[int, float]:
    """Cores in use by process: seconds of computing per second, over SAMPLE_SECONDS."""
    start, before = time.perf_counter(), {pid: _cpu_seconds(pid) for pid in pids}
    if pids:
        time.sleep(SAMPLE_SECONDS)
    after = {pid: _cpu_seconds(pid) for pid in pids}
    spent = max(time.perf_counter() - start, 1e-9)
    return {pid: max(0.0, after[pid] - before[pid]) / spent for pid in pids}


def memory(pids: Sequence[int]) -> dict[int, int]:
    """Bytes of each worker of a job, from counters that the system keeps: exact sums (PSS) would pause the workers.

    Pages inherited from the fork server are shared by its workers, and are divided among them.
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
    """Whether the process is a worker; its id may have passed to another program."""
    try:
        return b"moaic.runtime.worker.fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def temperature() -> float | None:
    """Degrees Celsius of the processor; None where the system has no sensor for it."""
    for name in Path("/sys/class/hwmon").glob("hwmon*/name"):
        if name.read_text(encoding="ascii").strip() in ("coretemp", "k10temp", "cpu_thermal"):
            readings = [int(path.read_text(encoding="ascii")) for path in name.parent.glob("temp*_input")]
            return max(readings) / 1000 if readings else None
    return None


def _resident(pid: int) -> dict[str, int]:
    """Bytes of private and of shared memory of a process, and its parent's id; empty once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    words = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    numbers = {name: 1024 * int(words[name][0]) for name in ("RssAnon", "RssShmem") if name in words}
    return {**numbers, "PPid": int(words["PPid"][0])}


def _cpu_seconds(pid: int) -> float:
    """Seconds of CPU time of the threads of a process."""
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(path.read_text(encoding="ascii").split()[0])
        except OSError:
            continue  # the thread has ended
    return total / 1e9
