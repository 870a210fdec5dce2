"""Jobs: the running programs of this user that have workers, as files that tools read.

A job has two files in the user's runtime folder: one that its program keeps locked while it runs, and one with its
entry. A program that ends without removing them leaves the first one unlocked; the next program that lists jobs
removes both.
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

from moaic.runtime.host.flavors import Flavor, HostShare
from moaic.runtime.host.folders import runtime_folder
from moaic.runtime.host.selection import next_job
from moaic.runtime.host.status import Status
from moaic.text.files import write_whole

LONGEST: Final = 1000
"""Characters of a command line that an entry keeps."""


UNUSED: Final = "not used yet"
"""The phase of a program whose workers were started before it used them."""


@dataclass(frozen=True, slots=True)
class JobEntry:
    """The entry of a job, written by its program."""

    job: int
    accelerator: int
    flavor: Flavor
    pid: int
    command: str
    started: float
    """Seconds since the epoch."""
    status: int = -1
    """The program's descriptor of the shared memory with the workers' status lines; -1 before there is one."""
    workers: tuple[int, ...] = ()
    """The process of each worker on its host; 0 before it has connected."""
    hosts: tuple[str, ...] = ()
    """The name of each worker's host, empty for this one; none before there are workers."""
    plan: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes of the selected plan and their sizes, outermost first."""
    phase: str = ""
    """What the program does before its workers can begin, such as `planning`; empty while it does not."""

    def host(self, rank: int) -> str:
        """The name of a worker's host; empty for this one."""
        return self.hosts[rank] if self.hosts else ""

    @property
    def workers_here(self) -> tuple[int, ...]:
        """The processes of the workers of this host: those of others mean nothing here."""
        return tuple(pid for rank, pid in enumerate(self.workers) if not self.host(rank))


class Job:
    """This program's entry, from the start of its workers until it is closed or the program ends."""

    def __init__(self, folder: Path, entry: JobEntry) -> None:
        """Raises OSError if files cannot be written, BlockingIOError if another program has this number."""
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

    def is_of(self, accelerator: int, flavor: Flavor) -> bool:
        """Whether the entry says that the program has this accelerator, of this flavor."""
        return (self._entry.accelerator, self._entry.flavor) == (accelerator, flavor)

    def started(self, workers: Sequence[int], status: int, hosts: Sequence[str] = ()) -> None:
        """Set the processes of the workers, the descriptor of their status lines, and the names of other hosts."""
        self._update(workers=tuple(workers), status=status, hosts=tuple(hosts))

    def planned(self, plan: str, mesh: tuple[tuple[str, int], ...]) -> None:
        """Set the plan of the last planned model."""
        self._update(plan=plan, mesh=mesh)

    def entered(self, phase: str) -> None:
        """Set the phase; empty at its end."""
        self._update(phase=phase)

    def close(self) -> None:
        """Remove the entry."""
        if os.getpid() == self._owner:
            self._path.unlink(missing_ok=True)
            _lock(self._path).unlink(missing_ok=True)
        self.abandon()

    def abandon(self) -> None:
        """Close the lock without removing the entry, as a forked child does: the entry is the parent's."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _update(self, **changes: Any) -> None:
        self._entry = replace(self._entry, **changes)
        # A full disk must not stop a training.
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        if self._lock >= 0:
            write_whole(self._path, json.dumps(asdict(self._entry)))


def begin(environment: Mapping[str, str], accelerator: int, flavor: Flavor) -> Job:
    """Write the entry of this program. Raises OSError, or Diagnostic for a folder that is not private."""
    folder, command = runtime_folder(environment), command_line(sys.orig_argv)
    while True:
        entry = JobEntry(next_job(environment), accelerator, flavor, os.getpid(), command, time.time())
        # The user may have several home folders, and numbers are counted in each; the runtime folder is one.
        with contextlib.suppress(BlockingIOError):
            return Job(folder, entry)


def command_line(words: Sequence[str]) -> str:
    """The command line with the name of the program instead of its path: `python train.py --lr 1`."""
    program, *rest = words or ["python"]
    return " ".join([Path(program).name, *rest]).replace("\n", " ")[:LONGEST]


def jobs(environment: Mapping[str, str]) -> list[JobEntry]:
    """The jobs whose programs are running, by number; files of ended programs are removed."""
    folder = runtime_folder(environment)
    found = [entry for path in folder.glob("[0-9]*.json") if (entry := _read(path)) is not None]
    return sorted(found, key=lambda entry: entry.job)


def status_of(entry: JobEntry) -> Status | None:
    """The status lines of a job's workers; None if there are none, or the program has ended."""
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
    """The entry of a running program; files of an ended one are removed."""
    if not _is_locked(_lock(path)):
        path.unlink(missing_ok=True)
        _lock(path).unlink(missing_ok=True)
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        hosts = tuple(HostShare(*share) for share in data["flavor"].pop("hosts"))
        data["flavor"] = Flavor(**data["flavor"], hosts=hosts)
        data["workers"], data["hosts"] = tuple(data["workers"]), tuple(data["hosts"])
        data["mesh"] = tuple((axis, size) for axis, size in data["mesh"])
        return JobEntry(**data)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # being written now, or written by another version


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            flock(file, LOCK_SH | LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
