"""The pool of compiler processes: finds what this process finds, and starts, replaces and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moaic.ir.printer import render
from moaic.passes.config import Config, Request
from moaic.planner import search
from moaic.planner.processes import ProcessPool
from moaic.planner.worker import InProcessPool
from tests.passes.steps import dense, machine
from tests.planner.test_pricer import deep_step, gpus


def test_processes_find_what_this_process_finds(pool: ProcessPool) -> None:
    for step in (dense(), dense(rows=4096, width=64)):
        here, there = (search.search(step, machine(), Request(), pool=each) for each in (InProcessPool(), pool))
        assert there.search_result == here.search_result
        assert render(there.plan.programs.joint) == render(here.plan.programs.joint)


def test_processes_bound_pipelines_as_this_process_does(pool: ProcessPool) -> None:
    step, where = deep_step(), gpus(overlaps=True)
    pipelines = [Config(dp=dp, pp=2, micro_batches=4, schedule="interleaved") for dp in (1, 2)]
    alone = InProcessPool()
    for each in (alone, pool):
        each.begin(step, where)
    found = pool.stage_bounds(pipelines)
    assert found == alone.stage_bounds(pipelines)
    assert all(each.seconds > 0 and each.nbytes > 0 for each in found)


def test_progress_counts_on_from_one_wave_to_the_next(pool: ProcessPool) -> None:
    told: list[tuple[int, int]] = []
    pool.begin(dense(), machine())
    pool.progress = lambda done, total: told.append((done, total))
    pool.compile([Config()])
    pool.compile([Config(dp=2), Config(dp=2, distribute_param="use")])
    pool.progress = None
    assert told == [(1, 1), (2, 3), (3, 3)]


def test_a_process_that_dies_is_reported_and_replaced() -> None:
    pool = ProcessPool(1)
    step, where = dense(), machine()
    pool.begin(step, where)
    (ready,) = pool.compile([Config()])
    assert ready.memory is not None
    os.kill(pool.pids[0], signal.SIGKILL)
    (crashed,) = pool.compile([Config(dp=2)])
    assert "ended with exit code -9" in crashed.crash
    (again,) = pool.compile([Config(dp=2)])
    assert again.memory is not None
    (prediction,) = pool.cost([Config(dp=2)])
    assert prediction.seconds.value > 0
    pool.close()


def test_a_process_that_has_gone_to_rest_is_started_again() -> None:
    pool = ProcessPool(1)
    pool.begin(dense(), machine())
    (first,) = pool.compile([Config()])
    (rested,) = pool.pids
    # What the process does by itself after a while, done here at once.
    pool.rest()
    assert not _lives(rested)
    (prediction,) = pool.cost([Config()])
    assert prediction.seconds.value > 0
    assert pool.compile([Config()]) == [first]
    assert pool.pids != [rested]
    pool.close()


def test_processes_that_nobody_asks_are_not_started() -> None:
    pool = ProcessPool(2)
    pool.begin(dense(), machine())
    pool.rest()
    pool.close()
    assert not pool.pids


def test_processes_end_with_whoever_started_them() -> None:
    code = """
import os, sys
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.planner.processes import ProcessPool
pool = ProcessPool(2)
pool.start()
print(*pool.pids, flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 5
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
