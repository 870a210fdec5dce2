"""Measured beside predicted: how long the workers take for a step, once its program is compiled and warm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.protocol.statistics import ProgramStatistics

WARM_UP: Final = 3
"""Compiled runs before the measured ones."""

STEPS: Final = 8
"""Measured runs."""


class StepClock:
    """Counts the runs of one program, and tells once how many seconds one of them took the slowest worker."""

    def __init__(self, tell: Callable[[float], None]) -> None:
        self._tell = tell
        self._program: int | None = None
        self._runs = 0
        self._before: list[ProgramStatistics] = []

    def about_to_run(self, accelerator: Accelerator, program: int) -> None:
        """Before every compiled run of a program; another program than the last starts the count anew."""
        if program != self._program:
            self._program, self._runs = program, 0
        if self._runs == WARM_UP:
            self._before = _spent(accelerator, program)
        elif self._runs == WARM_UP + STEPS and self._before:
            pairs = list(zip(self._before, _spent(accelerator, program), strict=True))
            # Replays of graphs are not in the times.
            if all(after.repeated == before.repeated for before, after in pairs):
                self._tell(max(map(_seconds, *zip(*pairs, strict=True))))
        self._runs += 1


def _spent(accelerator: Accelerator, program: int) -> list[ProgramStatistics]:
    return [worker.programs[program] for worker in accelerator.stats().workers if program in worker.programs]


def _seconds(before: ProgramStatistics, after: ProgramStatistics) -> float:
    """Seconds of a run between two reports."""
    spent = after.compute + after.communicate - before.compute - before.communicate
    return spent / max(1, after.runs - before.runs)
