"""The planner of this process: what a search needs beside the step, each made or measured once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from moaic.cache_folder import cache_folder
from moaic.ir.graph import Module
from moaic.logging_setup import install
from moaic.passes import machine as machines
from moaic.passes.candidates import candidates, relaxed
from moaic.passes.config import Request
from moaic.passes.dump import dump
from moaic.passes.machine import Machine
from moaic.passes.plan_cache import search_cached
from moaic.passes.search import Selection, search
from moaic.planner_pool import ProcessPool
from moaic.runtime import measure
from moaic.runtime.accelerator import Accelerator
from moaic.runtime.threads import cores


class Planner:
    """Selects plans for the steps of one process."""

    last: ClassVar[Planner | None] = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Raises Diagnostic for a MOAI_LOG that is none."""
        install(environment)
        self._folder = cache_folder(environment)
        root = environment.get("MOAI_DUMP")
        self._dump = Path(root) if root else None
        self._pool: ProcessPool | None = None
        self._machine: Machine | None = None

    @classmethod
    def current(cls) -> Planner:
        """The planner of this process."""
        if cls.last is None:
            cls.last = cls(os.environ)
        return cls.last

    def start(self) -> ProcessPool:
        """Starts the pool's processes: best before capture, since they get ready meanwhile."""
        if self._pool is None:
            self._pool = ProcessPool(cores())
        return self._pool

    def select(self, step: Module, request: Request, accelerator: Accelerator) -> Selection:
        """The best plan for `step` on the accelerator. Raises Diagnostic where none keeps to `request`."""
        if len(candidates(step, accelerator.flavor, relaxed(step, request))) == 1:
            selection = search(step, self._machine_for_one(accelerator), request, pool=self.start())
        else:
            machine = self._measured(accelerator)
            selection = search_cached(step, machine, request, pool=self.start(), folder=self._folder)
        if self._dump is not None:
            dump(self._dump, step, selection)
        return selection

    def close(self) -> None:
        """Ends the pool's processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _measured(self, accelerator: Accelerator) -> Machine:
        if self._machine is None:
            self._machine = machines.from_text(measure.measured(accelerator, self._folder))
        return self._machine

    def _machine_for_one(self, accelerator: Accelerator) -> Machine:
        """Nothing depends on the rates where there is no choice, so nothing is measured for it."""
        known = measure.found(accelerator, self._folder)
        return self._machine or machines.from_text(known or measure.assumed(accelerator))
