from __future__ import annotations

import io
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.parser import parse
from moaic.ir.printer import render
from moaic.passes.config import Config, Request
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf import machine as machines
from moaic.passes.perf.machine import Machine, Number
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.planner import log, plan_cache, search
from moaic.planner.dump import dump
from moaic.planner.processes import ProcessPool
from moaic.planner.worker import Compiled, InProcessPool, serve
from moaic.support.logging_setup import install
from tests.passes.steps import dense, evaluation, machine, normalized

SMALL = Request(recompute="saved")


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    made = ProcessPool(2)
    yield made
    made.close()


class Scripted:
    """A pool whose answers are given."""

    def __init__(
        self,
        seconds: dict[Config, float],
        peaks: dict[Config, int] | None = None,
        compiling: dict[Config, float] | None = None,
    ) -> None:
        self.seconds = seconds
        self.peaks = peaks or {}
        self.compiling = compiling or {}
        self.compiled: list[Config] = []

    def begin(self, step: Module, machine: Machine) -> None:
        pass

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        self.compiled += configs
        return [
            Compiled(Memory(0, 0, 0, self.peaks.get(config, 1))) if config in self.seconds else Compiled(dropped="no")
            for config in configs
        ]

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        return [
            Prediction({"heavy": Number(self.seconds[config])}, self.compiling.get(config, 0.0)) for config in configs
        ]


def test_what_takes_long_to_compile_must_be_faster_by_its_share() -> None:
    fast, soon = Config(tp=2), Config(dp=2)
    steps = {fast: 0.9, soon: 1.0}
    for compiling, chosen in ((50.0, fast), (200.0, soon)):
        pool = Scripted(steps, compiling={fast: compiling, soon: 1.0})
        assert search.search(dense(), machine(), SMALL, pool=pool).plan.config == chosen


def test_what_compiles_fast_is_for_few_steps(tmp_path: Path) -> None:
    fast, soon = Config(tp=2), Config(dp=2)
    pool = Scripted({fast: 0.9, soon: 1.0}, compiling={fast: 50.0, soon: 1.0})
    for steps, chosen in ((1000, fast), (100, soon), (1000, fast)):
        found = plan_cache.search_cached(dense(), machine(), SMALL, pool=pool, folder=tmp_path, steps=steps)
        assert found.plan.config == found.search_result.ranked[0].config == chosen


def test_the_log_says_why_a_plan_is_selected(caplog: pytest.LogCaptureFixture) -> None:
    best, second = Config(tp=2), Config(dp=2)
    for seconds, compiling, why in (
        (1.5, 0.0, "Next best: dp=2, 1.50 x as long: 500 [ms] more on products and attention."),
        (1.0, 0.0, "Next best: tp=2, equal within the error of the prediction, and less simple."),
        (1.0, 200.0, "Next best: dp=2, 1.20 x as long: 200 [s] to compile instead of 0."),
    ):
        caplog.clear()
        pool = Scripted({best: 1.0, second: seconds}, compiling={second: compiling})
        with caplog.at_level(logging.INFO, "moaic"):
            search.search(dense(), machine(), SMALL, pool=pool)
        assert caplog.messages[-2:] == ["It spends: 100% on products and attention.", why]


def test_later_graphs_of_a_model_take_two_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"), log.brief():
        search.search(dense(), machine(), SMALL, pool=InProcessPool())
    first, second = caplog.messages
    assert first.startswith("Another graph of this model (train: true) is planned: num_stages : 1, ")
    assert second.startswith("Predicted for a step: ")


def test_a_planner_is_known_by_every_file_of_it(tmp_path: Path) -> None:
    """Also by those in folders within: plans of another planner are not found again."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "one.py").write_text("1", encoding="utf-8")
    first = plan_cache.sources_hash(tmp_path)
    (tmp_path / "inner" / "one.py").write_text("2", encoding="utf-8")
    second = plan_cache.sources_hash(tmp_path)
    (tmp_path / "inner" / "one.py").rename(tmp_path / "one.py")
    assert len({first, second, plan_cache.sources_hash(tmp_path)}) == 3


def test_the_log_reads_as_people_know_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"):
        search.search(dense(), machine(), SMALL, pool=InProcessPool())
    lines = [record.getMessage() for record in caplog.records]
    numbers = [line for line in lines if line.startswith("Elapsed")]
    assert [line for line in lines if not line.startswith(("Elapsed", "Predicted", "Optimizer", "It ", "Next"))] == [
        "The number of candidates is 29.",
        "Parallel Graph Compile start...",
        "Parallel Graph Compile finished.",
        "The number of possible candidates is 15.",
        "SelectBestGraphFromCandidates start...",
        "SelectBestGraphFromCandidates finished.",
        "Configuration for parallelism is selected.",
        "num_stages : 1, num_micro_batches : 1, batch_per_device : 8, No TP, recomputation : false, "
        "distribute_param : false",
        "train: true",
    ]
    assert lines.index(numbers[0]) == 2
    assert numbers[0].startswith("Elapsed Time to compile all candidates = ")
    assert numbers[1].startswith("Elapsed Time to compute cost for survived candidates = ")
    assert all(line.endswith(" [ms]") for line in numbers)
    assert any("assumed: 2 values per trainable parameter element, of its type" in line for line in lines)


def test_processes_find_what_this_process_finds(pool: ProcessPool) -> None:
    for step in (dense(), dense(rows=4096, width=64)):
        here, there = (search.search(step, machine(), Request(), pool=each) for each in (InProcessPool(), pool))
        assert there.search_result == here.search_result
        assert render(there.plan.programs.joint) == render(here.plan.programs.joint)


def test_arithmetic_is_shared_out_and_small_steps_stay_on_one_device() -> None:
    large = search.search(dense(256, 256, 256), machine(), SMALL, pool=InProcessPool())
    assert large.plan.config.ranks == 2
    assert search.search(dense(), machine(), SMALL, pool=InProcessPool()).plan.config == Config()


def test_progress_counts_on_from_one_wave_to_the_next(pool: ProcessPool) -> None:
    told: list[tuple[int, int]] = []
    pool.begin(dense(), machine())
    pool.progress = lambda done, total: told.append((done, total))
    pool.compile([Config()])
    pool.compile([Config(dp=2), Config(dp=2, distribute_param="use")])
    pool.progress = None
    assert told == [(1, 1), (2, 3), (3, 3)]


def test_a_request_is_kept_to(pool: ProcessPool) -> None:
    found = search.search(dense(), machine(), Request(dp=2, micro_batches=2), pool=pool)
    assert (found.plan.config.dp, found.plan.config.micro_batches) == (2, 2)


def test_near_ties_go_to_the_simplest() -> None:
    request = Request(recompute="saved", tp=1)
    seconds = {
        Config(dp=2, micro_batches=2): 1.000,
        Config(dp=2, distribute_param="optimizer"): 1.001,
        Config(dp=2): 1.015,
        Config(): 1.100,
    }
    assert search.search(dense(), machine(), request, pool=Scripted(seconds)).plan.config == Config(dp=2)


def test_plans_that_do_not_fit_are_left_out_and_the_next_is_ranked() -> None:
    shards, anew = (Config(dp=2, distribute_param=level) for level in ("step", "use"))
    seconds = {Config(dp=2): 1.0, shards: 2.0, anew: 2.5, Config(): 3.0}
    peaks = {Config(dp=2): 2 << 30}
    found = search.search(dense(), machine(), Request(recompute="saved", tp=1), pool=Scripted(seconds, peaks))
    assert [each.config for each in found.search_result.ranked] == [found.plan.config, anew]
    assert found.plan.config == shards
    assert found.search_result.of(Config(dp=2)).dropped == "needs 2048 MiB per worker, and there are 1024 MiB"


def test_recomputing_is_compiled_only_where_memory_is_short() -> None:
    saved, full = Config(dp=2), Config(dp=2, recompute="full")
    seconds = {Config(): 3.0, saved: 1.0, full: 1.5}
    request = Request(tp=1, micro_batches=1, distribute_param="none")
    roomy, tight = Scripted(seconds), Scripted(seconds, {saved: 2 << 30})
    assert search.search(dense(), machine(), request, pool=roomy).plan.config == saved
    assert full not in roomy.compiled
    assert search.search(dense(), machine(), request, pool=tight).plan.config == full


def test_what_cannot_be_faster_is_not_compiled() -> None:
    seconds = {Config(): 3.0, Config(dp=2): 1.4}
    pool = Scripted(seconds)
    found = search.search(dense(), machine(), Request(recompute="saved", pp=1), pool=pool)
    assert found.plan.config == Config(dp=2)
    assert found.search_result.of(Config()).dropped == "takes at least 3000.0 ms, and another plan takes 1400.0 ms"


def test_what_cannot_fit_is_not_compiled() -> None:
    step, where = dense(4096, 256, 256), machine(memory=12 << 20)
    found = search.search(step, where, SMALL, pool=InProcessPool())
    reasons = {each.config: each.dropped for each in found.search_result.candidates}
    assert reasons[Config()].startswith("needs at least ")
    assert not reasons[found.plan.config]


def test_nothing_fits() -> None:
    with pytest.raises(Diagnostic, match=r"no plan fits: the smallest of 29, .*, needs 0 MiB per worker"):
        search.search(dense(), machine(memory=100), SMALL, pool=InProcessPool())


def test_the_op_in_the_way_of_micro_batches_is_named() -> None:
    with pytest.raises(Diagnostic, match="mb=4") as raised:
        search.search(normalized(), machine(), Request(micro_batches=4), pool=InProcessPool())
    assert "aten.amax" in raised.value.message or "body.norm" in str(raised.value)


def test_micro_batches_are_dropped_silently_where_nobody_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"):
        found = search.search(normalized(), machine(), Request(tp=1), pool=InProcessPool())
    assert found.plan.config.micro_batches == 1
    assert all(each.dropped for each in found.search_result.candidates if each.config.micro_batches > 1)
    assert all(record.levelno < logging.WARNING for record in caplog.records)


def test_evaluation_of_an_odd_batch_is_relaxed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = search.search(evaluation(rows=3), machine(), Request(dp=2), pool=InProcessPool())
    assert found.plan.config.dp == 1
    assert "a batch of 3 does not divide" in caplog.text.lower()


def test_ops_without_a_rule_are_named_with_their_cost(caplog: pytest.LogCaptureFixture) -> None:
    step = parse("""// moai 1
func @step(%x: f32[8, 512, 256] input "x") -> (f32[8, 512, 256] output "y") {
  %y = other.thing %x : f32[8, 512, 256]
  return %y
}
""")
    search.search(step, machine(), Request(), pool=InProcessPool())
    assert "`other.thing` has no sharding rule: every worker runs it whole (1 uses, 8 [MiB]" in caplog.text


def test_an_outcome_is_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    step, where = dense(), machine()
    first = plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path)
    with caplog.at_level(logging.INFO, "moaic"):
        second = plan_cache.search_cached(step, where, SMALL, pool=Scripted({}), folder=tmp_path)
    assert second.search_result == first.search_result
    assert render(second.plan.module) == render(first.plan.module)
    assert "planned before" in caplog.text
    assert "num_stages : 1" in caplog.text


def test_everything_that_matters_is_in_the_fingerprint() -> None:
    step, where, request = dense(), machine(), SMALL
    others = [
        plan_cache.fingerprint(dense(rows=16), where, request),
        plan_cache.fingerprint(step, machine(workers=4), request),
        plan_cache.fingerprint(step, where, Request(dp=2)),
    ]
    assert plan_cache.fingerprint(parse(render(step)), where, request) == plan_cache.fingerprint(step, where, request)
    assert len({plan_cache.fingerprint(step, where, request), *others}) == 4


def test_a_damaged_outcome_is_made_anew(tmp_path: Path) -> None:
    step, where = dense(), machine()
    first = plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text(encoding="utf-8")[:50], encoding="utf-8")
    assert (
        plan_cache.search_cached(step, where, SMALL, pool=InProcessPool(), folder=tmp_path).search_result
        == first.search_result
    )


def test_a_folder_that_cannot_be_written_to_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = plan_cache.search_cached(dense(), machine(), SMALL, pool=InProcessPool(), folder=tmp_path / "file")
    assert found.plan.config == Config()


def test_a_dump_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    step = dense()
    with pytest.raises(Diagnostic, match="MOAI_DUMP="):
        dump(tmp_path / "file", step, search.search(step, machine(), SMALL, pool=InProcessPool()))


def test_the_dump_can_be_read_and_parsed(tmp_path: Path) -> None:
    step = dense()
    found = search.search(step, machine(), Request(), pool=InProcessPool())
    folder = dump(tmp_path, step, found)
    for name in ("graph.moai", "plan.moai", "joint.moai", "forward.moai", "backward.moai"):
        parse((folder / name).read_text(encoding="utf-8"))
    table = (folder / "candidates.txt").read_text(encoding="utf-8")
    assert table.startswith("selected: num_stages : 1")
    assert search.NOT_NEEDED in table
    assert machines.from_text((folder / "machine.json").read_text(encoding="utf-8")) == machine()
    assert dump(tmp_path, step, found) == folder


def test_a_pool_process_knows_no_torch_and_starts_at_once() -> None:
    code = "import sys, moaic.planner.worker; sys.exit('torch' in sys.modules)"
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    assert time.perf_counter() - start < 10


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


def test_a_process_rests_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaic.planner.worker.REST_SECONDS", 0.01)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    requests.put(json.dumps({"step": render(dense()), "machine": machines.to_text(machine())}))
    serve(requests, io.StringIO())


def test_a_bug_in_one_candidate_leaves_the_others(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Buggy(Scripted):
        def compile(self, configs: Sequence[Config]) -> list[Compiled]:
            good = super().compile(configs)
            return [Compiled(crash="Trace\nKeyError: 1") if c.tp > 1 else g for c, g in zip(configs, good, strict=True)]

    found = plan_cache.search_cached(dense(), machine(), SMALL, pool=Buggy({Config(): 1.0}), folder=tmp_path)
    assert found.plan.config == Config()
    assert found.search_result.of(Config(tp=2)).dropped == "KeyError: 1"
    assert "which is a bug of moaic" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_plan_whose_programs_are_not_well_formed_is_never_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = search.build

    def spoilt(step: Module, config: Config, prices: CostCoefficients) -> Plan:
        plan = right(step, config, prices)
        programs, main = plan.programs, plan.programs.joint.main
        without = Module((*programs.joint.functions[:-1], replace(main, ops=main.ops[:-1])), programs.joint.mesh)
        return plan if config == Config() else replace(plan, programs=replace(programs, joint=without))

    monkeypatch.setattr(search, "build", spoilt)
    found = search.search(dense(), machine(), SMALL, pool=Scripted({Config(): 2.0, Config(dp=2): 1.0}))
    assert found.plan.config == Config()
    assert "pass lower made a module that is not well formed" in found.search_result.of(Config(dp=2)).dropped
    assert "which is a bug of moaic" in caplog.text


def test_a_plan_that_open_sizes_forbid_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    right = search.build

    def refused(step: Module, config: Config, prices: CostCoefficients) -> Plan:
        if config != Config():
            raise Diagnostic("a size is open")
        return right(step, config, prices)

    monkeypatch.setattr(search, "build", refused)
    found = search.search(dense(), machine(), SMALL, pool=Scripted({Config(): 2.0, Config(dp=2): 1.0}))
    assert found.plan.config == Config()
    assert found.search_result.of(Config(dp=2)).dropped == "a size is open"


def test_processes_end_with_whoever_started_them() -> None:
    code = """
import os, sys
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.planner.processes import ProcessPool
pool = ProcessPool(2)
print(*pool.pids, flush=True)
os._exit(0)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pids = [int(word) for word in ended.stdout.split()]
    deadline = time.monotonic() + 5
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"


def test_log_lines_look_as_asked_for() -> None:
    code = """
import logging, sys
from moaic.support.logging_setup import install
install({"MOAI_LOG": sys.argv[1]} if sys.argv[1:] else {})
install({"MOAI_LOG": sys.argv[1]} if sys.argv[1:] else {})
logger = logging.getLogger("moaic")
logger.debug("small"); logger.info("The number of candidates is %d.", 3); logger.warning("large")
"""

    def said(*arguments: str) -> list[str]:
        ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        return ended.stderr.splitlines()

    assert said() == ["[info] The number of candidates is 3.", "[warning] large"]
    assert said("warning") == ["[warning] large"]
    assert said("debug")[0] == "[debug] small"


def test_a_level_that_is_none_is_refused() -> None:
    with pytest.raises(Diagnostic, match="MOAI_LOG=loud is not a level"):
        install({"MOAI_LOG": "loud"})


def test_outcomes_are_plain_json() -> None:
    found = search.search(dense(), machine(), SMALL, pool=InProcessPool())
    text = plan_cache.to_text(found.search_result)
    assert json.loads(text)["selected"]["dp"] == found.plan.config.dp
    assert plan_cache.from_text(text) == found.search_result
