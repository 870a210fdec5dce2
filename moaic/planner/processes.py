"""A pool of compiler processes: started when they are needed, or while the graph is being captured.

Each runs `moaic.planner.worker`, without torch. `subprocess` starts them, as multiprocessing would run a script without
a main guard again. A process ends when its input is closed, so none survives this process; it also ends when it is idle
for a while, to free its memory, and is started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock, RLock, Thread
from typing import IO, Any

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.config import Config
from moaic.passes.estimate.lower_bound import replicated, unstaged
from moaic.passes.estimate.stages import StageBound
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf import machine_text
from moaic.passes.perf.machine import Machine
from moaic.planner import log
from moaic.planner.worker import Compiled, compiled_in, config_out, prediction_in

END_SECONDS = 1.0
"""Seconds from the end of its input until a process is killed."""


class Crash(Exception):
    """A pool process ended without an answer; the message is its error output."""


class _Rested(Exception):
    """A pool process had ended because it was idle."""


class ProcessPool:
    """Compiles candidates in several processes at once."""

    def __init__(self, processes: int) -> None:
        self._members = [_Member() for _ in range(processes)]
        self._owners: dict[Config, _Member] = {}
        self._homes: dict[Config, _Member] = {}
        """By plan without stages (`unstaged`), the process that has run its passes last."""
        self.progress: Callable[[int, int], None] | None = None
        """Called with the numbers of compiled and of known candidates, from any thread."""
        self._compiled = 0
        self.turn = RLock()
        """Held from `begin` to the last answer, as all requests between them concern that step."""
        self._end = weakref.finalize(self, _end, self._members, os.getpid())

    def start(self) -> None:
        """Starts the processes, which load meanwhile."""
        for member in self._members:
            member.start()

    @property
    def pids(self) -> list[int]:
        """Ids of the current processes."""
        return [member.process.pid for member in self._members if member.process is not None]

    def begin(self, step: Module, machine: Machine) -> None:
        """Sets the step of the following requests; a process receives it before its first candidate."""
        self._owners.clear()
        self._homes.clear()
        self._compiled = 0
        request = {"step": render(step), "machine": machine_text.to_text(machine)}
        for member in self._members:
            member.first = request

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        """Compiles the candidates; idle processes take the next ones. One that kills its process is a crash."""
        # Those of most stages take longest: none of them is left for the end.
        families = _Families(sorted(configs, key=lambda config: -config.pp), replicated, self._homes)
        found: dict[Config, Compiled] = {}

        def work(member: _Member) -> None:
            for config in families.taken_by(member):
                self._owners[config] = member
                try:
                    found[config] = compiled_in(member.ask({"compile": config_out(config)}))
                except Crash as crash:
                    found[config] = Compiled(crash=str(crash))
                if self.progress is not None:
                    self.progress(before + len(found), before + len(configs))

        before = self._compiled
        _at_once([_bound(work, member) for member in families.takers(self._members)])
        self._compiled += len(configs)
        return [found[config] for config in configs]

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        """Each candidate's prediction, from the process that compiled it."""
        found: dict[Config, Prediction] = {}

        def work(member: _Member) -> None:
            for config in configs:
                if self._owners[config] is member:
                    found[config] = prediction_in(member.ask({"cost": config_out(config)}))

        _at_once([_bound(work, member) for member in self._members])
        return [found[config] for config in configs]

    def stage_bounds(self, configs: Sequence[Config]) -> list[StageBound]:
        """What these pipelines take at least; nothing of one that kills its process, which is logged as a bug."""
        families = _Families(configs, unstaged, self._homes)
        found: dict[Config, StageBound] = {}

        def work(member: _Member) -> None:
            for config in families.taken_by(member):
                try:
                    found[config] = StageBound(**member.ask({"stages": config_out(config)}))
                except Crash as crash:
                    log.unbounded(str(crash))
                    found[config] = StageBound()

        _at_once([_bound(work, member) for member in families.takers(self._members)])
        return [found[config] for config in configs]

    def rest(self) -> None:
        """Ends the processes and waits for them; the next use starts them again."""
        for member in self._members:
            member.close(None)

    def close(self) -> None:
        """Ends the processes; the pool is of no use afterwards."""
        self._end()


class _Member:
    """One process and the step that it was told; a process that has died is replaced."""

    def __init__(self) -> None:
        self.first: Mapping[str, Any] | None = None
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        """The process, which is new if there is none."""
        if self.process is not None:
            return self.process
        self._told: Mapping[str, Any] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moaic.planner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        return self.process

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request, from a new process if the last one ended because it was idle. Raises Crash."""
        try:
            return self._told_and_asked(request)
        except _Rested:
            return self._told_and_asked(request)

    def _told_and_asked(self, request: Mapping[str, Any]) -> Any:
        """Sends the step if the process does not have it yet, then the request."""
        process = self.start()
        if self._told is not self.first:
            assert self.first is not None
            self._exchange(process, self.first)
            self._told = self.first
        return self._exchange(process, request)

    def _exchange(self, process: subprocess.Popen[str], request: Mapping[str, Any]) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise self._ended(process)
        return json.loads(answer)

    def _ended(self, process: subprocess.Popen[str]) -> Crash | _Rested:
        """The reason why the process ended."""
        code = process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        self.close()
        return Crash(f"{said}\na planner process ended with exit code {code}".strip()) if code else _Rested()

    def end_input(self) -> None:
        if self.process is not None:
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def close(self, seconds: float | None = END_SECONDS) -> None:
        """Ends the process; kills it after so many seconds."""
        if self.process is None:
            return
        self.end_input()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()
        self.process = None


def _end(members: Sequence[_Member], owner: int) -> None:
    """Ends the processes, unless this is a forked child, which only has copies of the pipes."""
    if os.getpid() != owner:
        return
    for member in members:
        member.end_input()
    for member in members:
        member.close()


def _environment() -> dict[str, str]:
    """This environment with moaic on PYTHONPATH, as the user's program may have found it by a path of its own."""
    root = str(Path(__file__).absolute().parents[2])
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([given, root]) if given else root
    # There is one process per core already.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class _Families:
    """Candidates by family: one process takes a whole one, whose members share passes or sketches.

    It takes first those whose passes it has run before, then new ones, then those of others.
    """

    def __init__(
        self, configs: Sequence[Config], family: Callable[[Config], Config], homes: dict[Config, _Member]
    ) -> None:
        families: dict[Config, list[Config]] = {}
        for config in configs:
            families.setdefault(family(config), []).append(config)
        self._homes = homes
        self._lock = Lock()
        self._count = len(families)
        self._kept = defaultdict[_Member, deque[list[Config]]](deque)
        """By process, those whose passes it has run."""
        self._new: dict[Config, list[list[Config]]] = {}
        """By plan without stages, those whose passes nobody has run."""
        for each in families.values():
            work = unstaged(each[0])
            (self._kept[homes[work]] if work in homes else self._new.setdefault(work, [])).append(each)

    def takers(self, members: Sequence[_Member]) -> list[_Member]:
        """As many processes as there are families: those that have run their passes before others."""
        return sorted(members, key=lambda member: not self._kept.get(member))[: self._count]

    def taken_by(self, member: _Member) -> Iterator[Config]:
        while family := self._take(member):
            yield from family

    def _take(self, member: _Member) -> list[Config]:
        with self._lock:
            own = self._kept[member]
            if not own and self._new:
                work = next(iter(self._new))
                own.extend(self._new.pop(work))
                self._homes[work] = member
            if own:
                return own.popleft()
            others = max(self._kept.values(), key=len)
            return others.pop() if others else []


def _bound(work: Callable[[_Member], None], member: _Member) -> Callable[[], None]:
    return lambda: work(member)


def _at_once(jobs: Sequence[Callable[[], None]]) -> None:
    """Runs each job in a thread; raises the first error after all have ended."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
