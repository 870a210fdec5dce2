"""The report of the last planned step, as `torch.moai` gives it to the user."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from moaic.runtime.controller import session


@dataclass(slots=True)
class Report:
    """The selected plan, and seconds by phase: capture, planning."""

    plan: str = ""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    last: ClassVar[Report | None] = None

    @classmethod
    def current(cls) -> Report:
        """The report of this process."""
        if cls.last is None:
            cls.last = cls()
        return cls.last

    @contextmanager
    def timed(self, name: str) -> Generator[None]:
        """Adds the seconds that the block takes to the timing `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

    def as_dict(self) -> dict[str, object]:
        return {"plan": self.plan, "timings": dict(self.timings)}


def last_step() -> dict[str, object]:
    """The plan of the last planned step, and the seconds of capture, planning and compiling."""
    found = Report.current()
    if session.SESSION.is_running():
        workers = session.accelerator().stats().workers
        found.timings["compile_s"] = max(
            sum(sum(program.compile.values()) for program in worker.programs.values()) for worker in workers
        )
    return found.as_dict()
