"""Measured beside predicted: how long the workers take for a step, once its program is compiled and warm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.protocol.statistics import ProgramStatistics

WARM_UP: Final = 3
"""Compiled runs before the measured ones."""

STEPS: Final = 8
"""Measured runs."""


Spent = list[list[ProgramStatistics]]
"""By worker, of each program."""


class StepClock:
    """Counts the runs of a step, and tells once how many seconds one of them took the slowest worker."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._programs: Sequence[int] = ()
        self._runs = 0
        self._before: Spent = []

    def about_to_run(self, accelerator: Accelerator, programs: Sequence[int]) -> None:
        """Before every compiled run of a step, in one program or in two; others than the last start the count anew."""
        if programs != self._programs:
            self._programs, self._runs, self._before = programs, 0, []
        if self._runs == WARM_UP:
            self._before = _spent(accelerator, programs)
        elif self._runs == WARM_UP + STEPS and self._before:
            workers = list(zip(self._before, _spent(accelerator, programs), strict=True))
            seconds = max(sum(map(_seconds, *pair)) for pair in workers)
            if seconds > 0:
                self._tell(seconds)
        self._runs += 1


def _spent(accelerator: Accelerator, programs: Sequence[int]) -> Spent:
    workers = accelerator.stats().workers
    return [[worker.programs[number] for number in programs if number in worker.programs] for worker in workers]


def _seconds(before: ProgramStatistics, after: ProgramStatistics) -> float:
    """Seconds of a run between two reports."""
    return (after.elapsed - before.elapsed) / max(1, after.runs - before.runs)
