"""Statistics of the workers' memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProgramStatistics:
    """The seconds that one worker has spent on one program so far."""

    compile: Mapping[str, float]
    """Compile time by function."""
    runs: int
    compute: float
    communicate: float
    """Time of communication, including the wait for other workers."""
    last_run: float
    repeated: int = 0
    """Runs that were replays of a CUDA graph: their times are in `elapsed` alone."""
    elapsed: float = 0.0
    """Time of the device from the begin of each run to its end."""


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One worker: its memory (`pss`: shared pages counted by share), its buffers and their bytes, its programs."""

    pid: int
    pss: int
    buffers: int
    bytes: int
    programs: Mapping[int, ProgramStatistics]
    peak: int = 0
    """Peak bytes of tensors, if the device's allocator counts them."""
    launches: Mapping[str, int] = field(default_factory=dict[str, int])
    """Launches of Triton kernels by name, where an emulated GPU counts them."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """All workers, the number of messages and commands that the controller has sent to each, and the bytes to all."""

    workers: tuple[WorkerStatistics, ...]
    messages: int
    commands: int
    sent: int

    @property
    def pss(self) -> int:
        """Bytes of all workers together."""
        return sum(worker.pss for worker in self.workers)


def statistics(answers: Mapping[int, Any], messages: int, commands: int, sent: int) -> Statistics:
    """The statistics from the workers' reports by rank."""
    return Statistics(tuple(_worker(answers[rank]) for rank in sorted(answers)), messages, commands, sent)


def _worker(report: Any) -> WorkerStatistics:
    programs = {number: ProgramStatistics(**program) for number, program in report["programs"].items()}
    memory = (report["pid"], report["pss"], report["buffers"], report["bytes"])
    return WorkerStatistics(*memory, programs, report["peak"], report["launches"])
