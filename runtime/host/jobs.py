"""Jobs: the programs of this person that have workers now, as files that tools read.

A job has two files in the person's runtime folder: one that its program holds locked for as long as it lives, and one
that says what it is. A program that ended without taking its files along leaves the first one unlocked; whoever looks
at jobs next takes them away.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import Any, Final

from moaic.runtime.host.flavors import Flavor
from moaic.runtime.host.folders import runtime_folder
from moaic.runtime.host.selection import next_job
from moaic.runtime.host.status import Status
from moaic.text.files import write_whole

LONGEST: Final = 1000
"""Characters of a command line that are kept."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """What a job is, as far as its program knows."""

    job: int
    accelerator: int
    flavor: Flavor
    pid: int
    command: str
    started: float
    """Seconds since the epoch."""
    status: int = -1
    """The program's descriptor of the memory that begins with the workers' status lines; -1 before there is one."""
    workers: tuple[int, ...] = ()
    """Process of each worker; 0 for one that has not said hello."""
    plan: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes of the selected plan and their sizes, outermost first."""


class Job:
    """This program's entry, which is there until it is closed or the program ends."""

    def __init__(self, folder: Path, entry: JobEntry) -> None:
        """Raises OSError where files cannot be written, BlockingIOError where another program has this number."""
        self._owner = os.getpid()
        self._path = folder / f"{entry.job}.json"
        self._entry = entry
        self._lock = os.open(_lock(self._path), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            flock(self._lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise
        self._write()

    @property
    def number(self) -> int:
        return self._entry.job

    def started(self, workers: Sequence[int], status: int) -> None:
        """Says which processes the workers are, and where they say what they do."""
        self._update(workers=tuple(workers), status=status)

    def planned(self, plan: str, mesh: tuple[tuple[str, int], ...]) -> None:
        """Says by which plan the last model is split."""
        self._update(plan=plan, mesh=mesh)

    def close(self) -> None:
        """Takes the entry away."""
        if os.getpid() == self._owner:
            self._path.unlink(missing_ok=True)
            _lock(self._path).unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """In a forked child: lets go of the lock, which is the parent's."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _update(self, **changes: Any) -> None:
        self._entry = replace(self._entry, **changes)
        # A full disk is no reason to stop a training.
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        if self._lock >= 0:
            write_whole(self._path, json.dumps(asdict(self._entry)))


def begin(environment: Mapping[str, str], accelerator: int, flavor: Flavor) -> Job:
    """Makes this program known. Raises OSError, or Diagnostic for a folder that is not private."""
    folder, command = runtime_folder(environment), command_line(sys.orig_argv)
    while True:
        entry = JobEntry(next_job(environment), accelerator, flavor, os.getpid(), command, time.time())
        # Numbers are counted in the person's home, of which they may have several.
        with contextlib.suppress(BlockingIOError):
            return Job(folder, entry)


def command_line(words: Sequence[str]) -> str:
    """`python train.py --lr 1`: a command as people name it."""
    program, *rest = words or ["python"]
    return " ".join([Path(program).name, *rest]).replace("\n", " ")[:LONGEST]


def jobs(environment: Mapping[str, str]) -> list[JobEntry]:
    """The jobs whose programs live, by number; the files of others are taken away."""
    folder = runtime_folder(environment)
    found = [entry for path in folder.glob("[0-9]*.json") if (entry := _read(path)) is not None]
    return sorted(found, key=lambda entry: entry.job)


def status_of(entry: JobEntry) -> Status | None:
    """The status lines of a job's workers; None where they are not there, or not any more."""
    if entry.status < 0:
        return None
    try:
        descriptor = os.open(f"/proc/{entry.pid}/fd/{entry.status}", os.O_RDONLY)
    except OSError:
        return None
    try:
        return Status(descriptor, len(entry.workers))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _lock(path: Path) -> Path:
    return path.with_suffix(".lock")


def _read(path: Path) -> JobEntry | None:
    """The entry of a program that lives; what a dead one left is taken away."""
    if not _is_locked(_lock(path)):
        path.unlink(missing_ok=True)
        _lock(path).unlink(missing_ok=True)
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        data["flavor"] = Flavor(**data["flavor"])
        data["workers"] = tuple(data["workers"])
        data["mesh"] = tuple((axis, size) for axis, size in data["mesh"])
        return JobEntry(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written only now, or by another version


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            flock(file, LOCK_SH | LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
