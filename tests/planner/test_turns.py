"""Models compiled in several threads plan one after another: the planner's processes hold one step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from moaic.capture.pieces import Piece
from moaic.compile import planning
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.ir.symbols import Symbols
from moaic.passes.config import Request
from moaic.passes.perf.numbers import Number
from moaic.planner import search
from moaic.planner.processes import ProcessPool
from moaic.planner.worker import InProcessPool
from moaic.runtime.controller.errors import EarlierFailure
from tests.passes.steps import dense, machine

REQUEST = Request(recompute="saved")


@pytest.mark.usefixtures("no_accelerator")
def test_steps_planned_in_threads_get_the_plans_that_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(2)
    monkeypatch.setattr(planning, "_pool", lambda: pool)
    steps = [dense(), dense(256, 256, 256), dense(rows=4096, width=64), dense(rows=16)]
    alone = [search.search(step, machine(), REQUEST, pool=InProcessPool()).plan for step in steps]
    with ThreadPoolExecutor(len(steps)) as threads:
        found = list(threads.map(_planned, steps))
    pool.close()
    assert found == [render(plan.programs.joint) for plan in alone]


def _planned(step: Module) -> str:
    return render(planning.Planning(REQUEST, Piece()).plan(step).programs.joint)


@pytest.mark.usefixtures("no_accelerator")
def test_an_error_of_the_user_is_raised_while_open_sizes_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RuntimeError of the planner means there that sizes cannot be open; that of an earlier op does not."""

    def open_sizes(step: Module) -> Symbols:
        return Symbols()

    def fails(expected: Mapping[str, float]) -> dict[str, Number]:
        raise EarlierFailure(RuntimeError("index 9 is out of bounds"))

    monkeypatch.setattr(planning, "measured_kernels", fails)
    monkeypatch.setattr(planning, "symbols_of", open_sizes)
    with pytest.raises(RuntimeError, match="index 9 is out of bounds"):
        planning.Planning(REQUEST, Piece()).plan(dense(256, 256, 256))
