"""What the workers say of their memory and their time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProgramStatistics:
    """What one program has cost one worker so far, in seconds."""

    compile: Mapping[str, float]
    """By function."""
    runs: int
    compute: float
    communicate: float
    """With the time spent waiting for other workers."""
    last_run: float
    repeated: int = 0
    """Runs that a recording on the GPU stood for, which counts for nothing above but `runs`."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One worker: its memory (`pss`: shared pages counted by share) and the bytes of its buffers, and its programs."""

    pid: int
    pss: int
    buffers: int
    bytes: int
    programs: Mapping[int, ProgramStatistics]
    peak: int = 0
    """Most bytes of tensors at a time, where the device's allocator counts them."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """All workers, and how much the controller has sent to each of them."""

    workers: tuple[WorkerStatistics, ...]
    messages: int
    commands: int

    @property
    def pss(self) -> int:
        """Bytes of all workers together."""
        return sum(worker.pss for worker in self.workers)


def statistics(answers: Mapping[int, Any], messages: int, commands: int) -> Statistics:
    """From the workers' reports, by rank."""
    return Statistics(tuple(_worker(answers[rank]) for rank in sorted(answers)), messages, commands)


def _worker(report: Any) -> WorkerStatistics:
    programs = {number: ProgramStatistics(**program) for number, program in report["programs"].items()}
    return WorkerStatistics(report["pid"], report["pss"], report["buffers"], report["bytes"], programs, report["peak"])
