"""Measured kernels of this machine: an SQLite file in the cache folder that grows with the plans considered."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.runtime.controller import session
from moaic.runtime.controller.calibrate import fingerprint, is_busy
from moaic.runtime.controller.kernel_timing import FAILURES, kernel_seconds, seconds_to_time, settle
from moaic.support.cache_folder import cache_folder

BUDGET: Final = 1.5
"""Seconds that measuring may take for one step."""

WAIT: Final = 0.5
"""Seconds to wait for another program that writes."""

PASSING: Final = ("locked", "unable to open", "readonly", "full", "disk I/O")
"""Words of the errors that say nothing against the file."""

TABLE: Final = """create table if not exists kernels
(machine text, kernel text, seconds real, primary key (machine, kernel)) without rowid"""


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """The rows of one machine. Without a file, or one that cannot be used, nothing is known and nothing kept."""

    path: Path | None
    machine: str

    def known(self, kernels: Iterable[str]) -> dict[str, float]:
        """Seconds of those that were measured before."""
        query = "select kernel, seconds from kernels where machine = ? and kernel = ?"
        return dict(self._do(query, [(self.machine, kernel) for kernel in kernels]))

    def keep(self, seconds: Mapping[str, float]) -> None:
        rows = [(self.machine, kernel, taken) for kernel, taken in seconds.items()]
        self._do("insert or replace into kernels values (?, ?, ?)", rows)

    def forget(self) -> None:
        self._do("delete from kernels where machine = ?", [(self.machine,)])

    def _do(self, statement: str, rows: Sequence[tuple[object, ...]]) -> list[tuple[str, float]]:
        """What a statement answers, done for every row of arguments. A file that is no such database is removed."""
        if self.path is None or not rows:
            return []
        try:
            with closing(sqlite3.connect(self.path, timeout=WAIT)) as database, database:
                database.execute(TABLE)
                return [answer for row in rows for answer in database.execute(statement, row)]
        except sqlite3.Error as error:
            if not any(reason in str(error) for reason in PASSING):
                with suppress(OSError):
                    self.path.unlink()
            return []


def this_profile() -> KernelProfile:
    """The measured kernels of this machine with the flavor of this program."""
    folder = cache_folder(os.environ)
    return KernelProfile(None if folder is None else folder / "kernels.sqlite", fingerprint(session.SESSION.flavor()))


def measured_kernels(expected: Mapping[str, float]) -> dict[str, Number] | None:
    """Seconds of the kernels of `expected`, by text: of those that are known, and of as many more as the budget allows.

    `expected` has the seconds that each is expected to take; those that take most are measured first. None where this
    is not the time to measure: a pending forward would have to run alone, before its backward, and a compiler takes the
    cores that are to be timed. Raises EarlierFailure where an earlier command of the user has failed.
    """
    profile, accelerator = this_profile(), session.accelerator()
    found = profile.known(expected)
    missing = sorted(expected.keys() - found.keys(), key=lambda each: -expected[each])
    if missing and (accelerator.pending is not None or accelerator.is_compiling):
        return None
    new: dict[str, float] = {}
    try:
        with session.SESSION.phase("measuring"):
            _measure(missing, expected, new)
    finally:
        # What is measured on a busy machine is better than rates, and measured again by the next program.
        if not is_busy():
            profile.keep(new)
    return {kernel: Number(seconds, MeasureSource.MEASURED) for kernel, seconds in (found | new).items()}


def _measure(kernels: Sequence[str], expected: Mapping[str, float], new: dict[str, float]) -> None:
    """Adds the seconds of kernels to `new`, while the budget lasts."""
    accelerator, end = session.accelerator(), time.monotonic() + BUDGET
    if kernels:
        settle(accelerator)
    for kernel in kernels:
        if time.monotonic() + seconds_to_time(accelerator, expected[kernel]) <= end:
            # One that cannot run alone, such as for want of memory, is priced by rates.
            with suppress(*FAILURES):
                new[kernel] = kernel_seconds(accelerator, kernel, expected[kernel])
