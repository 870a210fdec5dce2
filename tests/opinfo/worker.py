"""One process of the sweep: runs cases one after another, and records the outcome of each sample before the next."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, TextIO

import torch

from moaic.ir.errors import Diagnostic
from tests.opinfo.areas import AREAS, Absent, Run
from tests.opinfo.compare import MOAI, Differs
from tests.opinfo.record import Case, Line, Outcome

_CLEAR: Final = (Diagnostic, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What may be raised on purpose."""

_OF_THE_DISPATCHER: Final = re.compile(r"INTERNAL ASSERT|C\+\+ CapturedTraceback|Could not run|Meta tensors")
"""Words of messages that nobody wrote for people."""


def outcome_of(run: Run) -> tuple[Outcome, str]:
    """How one sample went, and what was said of it."""
    try:
        run()
    except Absent as absent:
        return Outcome.ABSENT, str(absent)
    except Differs as differs:
        return Outcome.WRONG, str(differs)
    except Exception as error:
        return _raised(error)
    return Outcome.RIGHT, ""


def _raised(error: Exception) -> tuple[Outcome, str]:
    told: Any = getattr(error, "inner_exception", None) or error
    text = f"{type(told).__name__}: {told}"
    if not _is_alive():
        return Outcome.LOST, text
    short = len(str(told).strip().splitlines()) <= 3
    clear = isinstance(told, _CLEAR) and short and _OF_THE_DISPATCHER.search(str(told)) is None
    return Outcome.REFUSED if clear else Outcome.UNCLEAR, text


def _is_alive() -> bool:
    try:
        return bool(torch.ones((), device=MOAI).add(1).item() == 2)
    except Exception:
        return False


def _runs(case: Case, begin: int) -> Iterator[Run]:
    yield from islice(AREAS[case.area].samples(case.name), begin, None)


def sweep(cases: Sequence[tuple[Case, int]], out: TextIO) -> None:
    """Runs the cases, each from its sample on; ends the process where the workers are lost."""

    def say(case: Case, sample: int, outcome: Outcome, message: str = "") -> None:
        out.write(Line(case, sample, outcome, message).text() + "\n")
        out.flush()

    for case, begin in cases:
        sample = begin
        say(case, sample, Outcome.BEGUN)
        for outcome, message in _outcomes(case, begin):
            say(case, sample, outcome, message)
            if outcome is Outcome.LOST:
                os._exit(0)
            sample += 1
            say(case, sample, Outcome.BEGUN)
        say(case, sample, Outcome.DONE)


def _outcomes(case: Case, begin: int) -> Iterator[tuple[Outcome, str]]:
    runs = _runs(case, begin)
    while True:
        try:
            run = next(runs, None)
        except Exception as error:
            yield Outcome.ABSENT, f"{type(error).__name__}: {error}"
            return
        if run is None:
            return
        yield outcome_of(run)


def main(given: str, written: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [(Case(area, name), begin) for area, name, begin in json.loads(Path(given).read_text(encoding="utf-8"))]
    with Path(written).open("a", encoding="utf-8") as out:
        sweep(cases, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
