"""The record of the sweep: a line for each sample that began, and for each outcome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Outcome(StrEnum):
    RIGHT = "right"
    REFUSED = "refused"
    """By an error for people, of at most three lines."""
    WRONG = "wrong"
    UNCLEAR = "unclear"
    """Refused by an error that nobody wrote for this case."""
    LOST = "lost"
    """With the workers, or with the process."""
    ABSENT = "absent"
    """The CPU cannot do it either."""
    BEGUN = "begun"
    DONE = "done"
    """No sample of the case is left."""


@dataclass(frozen=True)
class Case:
    """One op, module or optimizer in one area."""

    area: str
    name: str


@dataclass(frozen=True)
class Line:
    case: Case
    sample: int
    outcome: Outcome
    message: str = ""

    def text(self) -> str:
        return json.dumps([self.case.area, self.case.name, self.sample, self.outcome, self.message])

    @staticmethod
    def parse(text: str) -> Line:
        area, name, sample, outcome, message = json.loads(text)
        return Line(Case(area, name), sample, Outcome(outcome), message)


def lines(path: Path) -> list[Line]:
    """Of a file that may not be there yet."""
    return [Line.parse(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def left(cases: Sequence[Case], written: Sequence[Line]) -> list[tuple[Case, int]]:
    """The cases that are not done, each with the sample to go on with."""
    done = {line.case for line in written if line.outcome is Outcome.DONE}
    begin = {line.case: line.sample + 1 for line in written if line.outcome not in (Outcome.BEGUN, Outcome.DONE)}
    return [(case, begin.get(case, 0)) for case in cases if case not in done]


def results(folder: Path) -> list[Line]:
    """What came of all samples that were run, in the order of files and lines."""
    found = [line for path in sorted(folder.glob("*.jsonl")) for line in lines(path)]
    return [line for line in found if line.outcome not in (Outcome.BEGUN, Outcome.DONE, Outcome.ABSENT)]
