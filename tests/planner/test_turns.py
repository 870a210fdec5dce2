"""Models compiled in several threads plan one after another: the planner's processes hold one step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from moaic.capture.pieces import Piece
from moaic.compile import planning
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.config import Request
from moaic.planner import search
from moaic.planner.processes import ProcessPool
from moaic.planner.worker import InProcessPool
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
