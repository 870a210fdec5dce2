from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from moaic.compile import planning
from moaic.planner.processes import ProcessPool
from moaic.planner.worker import InProcessPool
from tests.passes.steps import machine


@pytest.fixture(scope="module", autouse=True)
def planners_stay() -> None:
    """Not here: that they rest is tested."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    made = ProcessPool(2)
    yield made
    made.close()


class Alone(InProcessPool):
    """The planner's processes, of which there are none."""

    turn = nullcontext()
    progress: Callable[[int, int], None] | None = None

    def rest(self) -> None:
        pass


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of `planning` for a made-up machine, without workers and processes."""

    def passed(*_: object) -> None:
        pass

    face = SimpleNamespace(explain_shortage=passed)
    pool = Alone()
    monkeypatch.setattr(planning, "_pool", lambda: pool)
    monkeypatch.setattr(planning, "this_machine", machine)
    monkeypatch.setattr(planning, "cache_folder", passed)
    monkeypatch.setattr(planning, "measured_kernels", passed)
    monkeypatch.setattr(
        planning,
        "session",
        SimpleNamespace(SESSION=SimpleNamespace(planned=passed, phase=nullcontext), accelerator=lambda: face),
    )
