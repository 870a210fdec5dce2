"""The planner's processes: started early, while the graph is still being captured, and kept until the plan is made.

Each runs `moaic.planner.worker` and knows no torch. They are started by `subprocess` on our own module: multiprocessing
would run the person's unguarded script again. They end with their input, so whatever this process does, none stays;
one that has had nothing to do for a while ends too, to give its memory back, and is started again when it is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from threading import RLock, Thread
from typing import IO, Any

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.config import Config
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf import machine as machines
from moaic.passes.perf.machine import Machine
from moaic.planner.worker import Compiled, compiled_in, config_out, prediction_in

END_SECONDS = 1.0
"""A process whose input has ended is given this long before it is killed."""


class Crash(Exception):
    """A pool process ended without an answer; the message is what it wrote to its error stream."""


class _Rested(Exception):
    """A pool process had gone to rest; a new one is there."""


class ProcessPool:
    """Compiles candidates in several processes at once."""

    def __init__(self, processes: int) -> None:
        self._members = [_Member() for _ in range(processes)]
        self._owners: dict[Config, _Member] = {}
        self.progress: Callable[[int, int], None] | None = None
        """Told how many candidates of how many, as far as is known, are compiled; from any thread."""
        self._compiled = 0
        self.turn = RLock()
        """Held from `begin` to the last answer: what is asked between them is about that step."""
        self._end = weakref.finalize(self, _end, self._members, os.getpid())

    @property
    def pids(self) -> list[int]:
        """Of the processes there are now."""
        return [member.pid for member in self._members]

    def begin(self, step: Module, machine: Machine) -> None:
        """What follows is about `step`; a process is told when it gets its first candidate of it."""
        self._owners.clear()
        self._compiled = 0
        request = {"step": render(step), "machine": machines.to_text(machine)}
        for member in self._members:
            member.first = request

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        """Whoever is free takes the next few; a candidate that kills its process is a crash, with what it said."""
        waiting = deque(_families(configs))
        found: dict[Config, Compiled] = {}

        def work(member: _Member) -> None:
            for config in _taken(waiting):
                self._owners[config] = member
                try:
                    found[config] = compiled_in(member.ask({"compile": config_out(config)}))
                except Crash as crash:
                    found[config] = Compiled(crash=str(crash))
                if self.progress is not None:
                    self.progress(before + len(found), before + len(configs))

        before = self._compiled
        _at_once([_bound(work, member) for member in self._members[: len(configs)]])
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

    def rest(self) -> None:
        """Ends the processes; the next use starts them again."""
        for member in self._members:
            member.rest()

    def close(self) -> None:
        """Ends the processes; the pool is of no use afterwards."""
        self._end()


class _Member:
    """One process and what it has been told; it is replaced when it has died."""

    def __init__(self) -> None:
        self.first: Mapping[str, Any] | None = None
        self._start()

    def _start(self) -> None:
        self._told: Mapping[str, Any] | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "moaic.planner.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=_environment(),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The answer to a request, from a new process if the last one has gone to rest. Raises Crash."""
        try:
            return self._told_and_asked(request)
        except _Rested:
            return self._told_and_asked(request)

    def _told_and_asked(self, request: Mapping[str, Any]) -> Any:
        """Before the request the step is told, if that is news."""
        if self._told is not self.first:
            assert self.first is not None
            self._exchange(self.first)
            self._told = self.first
        return self._exchange(request)

    def _exchange(self, request: Mapping[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdin.closed:
            raise self._replaced()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise self._replaced()
        return json.loads(answer)

    def _replaced(self) -> Crash | _Rested:
        """Starts a new process; returns what became of the old one."""
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        self.close()
        self._start()
        return Crash(f"{said}\na planner process ended with exit code {code}".strip()) if code else _Rested()

    def rest(self) -> None:
        """Ends the process and waits for it."""
        self.end_input()
        self._process.wait()

    def end_input(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """Waits a little for the process, then kills it."""
        self.end_input()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


def _end(members: Sequence[_Member], owner: int) -> None:
    """Ends the processes, unless this is a forked child, which only has copies of the pipes."""
    if os.getpid() != owner:
        return
    for member in members:
        member.end_input()
    for member in members:
        member.close()


def _environment() -> dict[str, str]:
    """Ours, and where moaic is found: the person's program may have found it by its own path."""
    root = str(Path(__file__).absolute().parents[2])
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([given, root]) if given else root
    # There is a process per core already, and nothing here is worth a second thread.
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def _families(configs: Sequence[Config]) -> list[list[Config]]:
    """Candidates that differ in how parameters are distributed go to one process: they share all earlier passes."""
    families: dict[Config, list[Config]] = {}
    for config in configs:
        alike = replace(config, distribute_param="none", distribute_low_prec_param=False)
        families.setdefault(alike, []).append(config)
    return list(families.values())


def _taken(waiting: deque[list[Config]]) -> Iterable[Config]:
    while True:
        try:
            yield from waiting.popleft()
        except IndexError:
            return


def _bound(work: Callable[[_Member], None], member: _Member) -> Callable[[], None]:
    return lambda: work(member)


def _at_once(jobs: Sequence[Callable[[], None]]) -> None:
    """Runs the jobs in a thread each; the first error is raised once all have ended."""
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
