"""The findings of the parts of `bench/gpu.py`: one line each in a file, which remains if a part crashes."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must hold."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its unit: what was measured of which way of doing something."""

    subject: str
    """What is done, such as a kernel at a shape."""
    way: str
    """Who does it."""
    name: str
    value: float
    unit: str
    wanted: str = ""
    """`>= 1.05`: what the project wants of it."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What was not done, and why."""

    name: str
    reason: str


Finding = Check | Figure | LeftOut

KINDS: Mapping[str, type[Check] | type[Figure] | type[LeftOut]] = {
    "check": Check,
    "figure": Figure,
    "left out": LeftOut,
}


@dataclass(frozen=True, slots=True)
class Task:
    """What a part is asked to do: until when, where to write, and whether on the CPU at tiny sizes."""

    findings: Path
    deadline: float
    """Of `time.monotonic`."""
    here: bool

    @property
    def device(self) -> str:
        return "cpu" if self.here else "cuda"

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def beside(self) -> Generator[None]:
        """While other parts use the GPU, too, and none takes times."""
        with self._holding(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Generator[None]:
        """While no other part uses the GPU: times may be taken."""
        with self._holding(fcntl.LOCK_EX):
            yield

    @contextmanager
    def in_time(self) -> Generator[None]:
        """Says what is left out where others keep the GPU until the time is over."""
        try:
            yield
        except TimeoutError as reason:
            self.say(LeftOut("the rest of this part", str(reason)))

    @contextmanager
    def _holding(self, kind: int) -> Generator[None]:
        with self.findings.with_name("gpu.lock").open("a") as file:
            self._lock(file, kind)
            try:
                yield
            finally:
                # Not by closing it alone: a process that was forked meanwhile has it open, too.
                fcntl.flock(file, fcntl.LOCK_UN)

    def _lock(self, file: TextIO, kind: int) -> None:
        """Raises TimeoutError where others keep the GPU until this part's time is over."""
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            if self.seconds_left < 0:
                raise TimeoutError("other parts kept the GPU until the time was over")
            time.sleep(0.05)

    def say(self, *found: Finding) -> None:
        """Written down at once."""
        with self.findings.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(encoded(each)) + "\n" for each in found)


def encoded(finding: Finding) -> dict[str, Any]:
    """As JSON has it."""
    kind = next(name for name, kind in KINDS.items() if isinstance(finding, kind))
    return {"kind": kind, **asdict(finding)}


def decoded(fields: Mapping[str, Any]) -> Finding:
    """The inverse."""
    return KINDS[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def findings_in(path: Path) -> Iterator[Finding]:
    """What a part has written; a last line that was cut off with it is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return (decoded(json.loads(line)) for line in lines)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """What every part takes."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("findings", type=Path, help="file that findings are added to")
    made.add_argument("--seconds", type=float, required=True, help="time that the part has, its start included")
    made.add_argument("--here", action="store_true", help="on the CPU, at tiny sizes")
    return made


def task_of(args: argparse.Namespace) -> Task:
    return Task(args.findings, time.monotonic() + args.seconds - process_seconds(), args.here)


def process_seconds() -> float:
    """Since this process began: imports have taken some of its time."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
