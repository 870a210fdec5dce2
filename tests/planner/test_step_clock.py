"""Steps are timed once they are compiled and warm, and told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from moaic.compile.step_clock import STEPS, WARM_UP, StepClock
from moaic.runtime.protocol.statistics import ProgramStatistics


class Workers:
    """Workers whose runs of each program take so many seconds, and whose first runs take ten times as long."""

    def __init__(self, seconds: Sequence[Mapping[int, float]]) -> None:
        self.seconds = seconds
        self.runs: dict[int, int] = {}

    def run(self, programs: Sequence[int]) -> None:
        for number in programs:
            self.runs[number] = self.runs.get(number, 0) + 1

    def stats(self) -> Any:
        return SimpleNamespace(workers=[SimpleNamespace(programs=self._programs(each)) for each in self.seconds])

    def _programs(self, seconds: Mapping[int, float]) -> dict[int, ProgramStatistics]:
        return {
            number: ProgramStatistics({}, runs, 0.0, 0.0, 0.0, elapsed=(runs + 9) * seconds[number])
            for number, runs in self.runs.items()
            if number in seconds
        }


def told(workers: Any, steps: Sequence[Sequence[int]]) -> list[float]:
    found: list[float] = []
    clock = StepClock(found.append)
    for programs in steps:
        clock.about_to_run(workers, programs)
        workers.run(programs)
    return found


ENOUGH = WARM_UP + STEPS + 1


def test_the_slowest_worker_counts_and_is_told_once() -> None:
    assert told(Workers([{0: 1.0}, {0: 3.0}]), [[0]] * (3 * ENOUGH)) == [pytest.approx(3.0)]
    assert told(Workers([{0: 1.0}]), [[0]] * (ENOUGH - 1)) == []


def test_a_step_of_two_programs_takes_both() -> None:
    assert told(Workers([{1: 1.0, 2: 2.0}, {1: 2.0, 2: 0.5}]), [[1, 2]] * ENOUGH) == [pytest.approx(3.0)]


def test_another_program_starts_the_count_anew() -> None:
    steps = [[0]] * (ENOUGH - 1) + [[1]] * ENOUGH
    assert told(Workers([{0: 1.0, 1: 5.0}]), steps) == [pytest.approx(5.0)]
    assert told(Workers([{0: 1.0, 1: 5.0}]), [[0], [1]] * ENOUGH) == []


def test_a_worker_that_takes_no_part_has_no_times() -> None:
    assert told(Workers([{0: 1.0}, {}]), [[0]] * ENOUGH) == [pytest.approx(1.0)]
