"""Measured kernels of this machine: an SQLite file in the cache folder that grows with the plans considered."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.runtime.controller import session
from moaic.runtime.controller.calibrate import fingerprint
from moaic.runtime.controller.errors import OP_ERRORS, WorkerError
from moaic.runtime.controller.kernel_timing import kernel_seconds, seconds_to_time
from moaic.support.cache_folder import cache_folder

BUDGET: Final = 1.5
"""Seconds that measuring may take for one step."""

WAIT: Final = 2.0
"""Seconds to wait for another program that writes."""

TABLE: Final = """create table if not exists kernels
(machine text, kernel text, seconds real, primary key (machine, kernel)) without rowid"""


@dataclass(frozen=True, slots=True)
class KernelProfile:
    """The rows of one machine. Without a file, or one that cannot be used, nothing is known and nothing kept."""

    path: Path | None
    machine: str

    def known(self, kernels: Iterable[str]) -> dict[str, float]:
        """Seconds of those that were measured before."""
        found: dict[str, float] = {}
        query = "select seconds from kernels where machine = ? and kernel = ?"
        for kernel in kernels:
            for (seconds,) in self._do(query, [(self.machine, kernel)]):
                found[kernel] = seconds
        return found

    def keep(self, seconds: Mapping[str, float]) -> None:
        rows = [(self.machine, kernel, taken) for kernel, taken in seconds.items()]
        self._do("insert or replace into kernels values (?, ?, ?)", rows)

    def forget(self) -> None:
        self._do("delete from kernels where machine = ?", [(self.machine,)])

    def _do(self, statement: str, rows: Iterable[tuple[object, ...]]) -> list[tuple[float]]:
        """What a statement answers, done for every row of arguments."""
        if self.path is None:
            return []
        try:
            with closing(sqlite3.connect(self.path, timeout=WAIT)) as database, database:
                database.execute(TABLE)
                return [answer for row in rows for answer in database.execute(statement, row)]
        except sqlite3.Error:
            return []


def this_profile() -> KernelProfile:
    """The measured kernels of this machine with the flavor of this program."""
    folder = cache_folder(os.environ)
    return KernelProfile(None if folder is None else folder / "kernels.sqlite", fingerprint(session.SESSION.flavor()))


def measured_kernels(expected: Mapping[str, float]) -> dict[str, Number]:
    """Seconds of the kernels of `expected`, by text: of those that are known, and of as many more as the budget allows.

    `expected` has the seconds that each is expected to take; those that take most are measured first.
    """
    profile, accelerator = this_profile(), session.accelerator()
    found = profile.known(expected)
    new: dict[str, float] = {}
    left = BUDGET
    # A pending forward would have to run alone, before its backward.
    missing = [] if accelerator.pending else sorted(expected.keys() - found.keys(), key=lambda each: -expected[each])
    with session.SESSION.phase("measuring"):
        if missing:
            accelerator.synchronize()  # raises what has failed before, which is the user's to see
        for kernel in missing:
            if (needed := seconds_to_time(expected[kernel])) > left:
                continue
            left -= needed
            # One that cannot run alone, such as for want of memory, is priced by rates.
            with suppress(WorkerError, *OP_ERRORS.values()):
                new[kernel] = kernel_seconds(accelerator, kernel, expected[kernel])
    profile.keep(new)
    return {kernel: Number(seconds, MeasureSource.MEASURED) for kernel, seconds in (found | new).items()}
