"""Which plan is selected: the fastest that fits, within the error of the prediction the simplest."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import Config, Request, simplicity
from moaic.passes.estimate.stages import StageBound
from moaic.passes.estimate.step_time import EXPECTED_STEPS
from moaic.passes.lowering.plan import Plan
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.planner import evaluation as evaluation_module
from moaic.planner import plan_cache, search
from moaic.planner.candidates import candidates
from moaic.planner.outcome import TIE
from moaic.planner.pricer import Pricer
from moaic.planner.processes import ProcessPool
from moaic.planner.worker import Compiled, InProcessPool
from tests.passes.steps import dense, evaluation, machine, normalized
from tests.planner.scripted import SMALL, Scripted


def test_what_takes_long_to_compile_must_be_faster_by_its_share() -> None:
    fast, soon = Config(dp=2), Config(tp=2)
    steps = {fast: 0.9, soon: 1.0}
    for compiling, chosen in ((50.0, fast), (200.0, soon)):
        pool = Scripted(steps, compiling={fast: compiling, soon: 1.0})
        assert search.search(dense(), machine(), SMALL, pool=pool).plan.config == chosen


def test_arithmetic_is_shared_out_and_small_steps_stay_on_one_device() -> None:
    large = search.search(dense(256, 256, 256), machine(), SMALL, pool=InProcessPool())
    assert large.plan.config.ranks == 2
    assert search.search(dense(), machine(), SMALL, pool=InProcessPool()).plan.config == Config()


@pytest.mark.parametrize(
    ("least", "most"),
    [
        ((1280, 5), (1280, 6)),
        ((2560, 5), (2560, 7)),
        ((1280, 6), (3840, 6)),
        *(
            pytest.param((256 * rows, workers), (256 * rows * times, more), marks=pytest.mark.exact)
            for rows in (5, 6, 7, 9)
            for workers in (1, 2, 3, 5, 8)
            for times, more in ((1, workers + 1), (2, workers), (3, workers))
        ),
    ],
)
def test_no_device_and_no_row_is_one_too_many(least: tuple[int, int], most: tuple[int, int]) -> None:
    """More devices, or several times as many rows, never mean less throughput, ties aside."""

    def rows_per_second(rows: int, workers: int) -> float:
        where = replace(machine(workers=workers), memory=1 << 40)
        found = search.search(dense(rows, 256, 256), where, Request(), pool=InProcessPool()).search_result
        return rows / found.of(found.selected).price(found.steps)

    assert rows_per_second(*most) * (1 + TIE) >= rows_per_second(*least)


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
    assert [each.config for each in found.search_result.ranked] == [found.plan.config, anew, Config()]
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
    step, where = dense(4096, 256, 256), machine(memory=8 << 20)
    found = search.search(step, where, SMALL, pool=InProcessPool())
    reasons = {each.config: each.dropped for each in found.search_result.candidates}
    assert reasons[Config(dp=2)].startswith("needs at least ")
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


def test_evaluation_of_too_few_rows_is_relaxed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    found = search.search(evaluation(rows=1), machine(), Request(dp=2), pool=InProcessPool())
    assert found.plan.config.dp == 1
    assert "A batch of 1 cannot be split as was asked for" in caplog.text


def test_an_odd_batch_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"):
        found = search.search(dense(rows=5), machine(), Request(dp=2), pool=InProcessPool())
    assert found.plan.config.dp == 2
    assert "batch_per_device : 3" in caplog.text


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


def test_a_bug_in_a_bound_leaves_the_candidate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(pricer: Pricer, config: Config) -> StageBound:
        raise KeyError(str(config))

    monkeypatch.setattr(Pricer, "stage_bound", fails)
    pool = InProcessPool()
    pool.begin(dense(), machine())
    assert pool.stage_bounds([Config(pp=2, micro_batches=2)]) == [StageBound()]
    assert "which is a bug of moaic" in caplog.text


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


@cache
def priced_of(rows: int, width: int, hidden: int, workers: int) -> dict[Config, tuple[int, float]]:
    """What every possible candidate needs of memory, and its price."""
    step, found = dense(rows, width, hidden), dict[Config, tuple[int, float]]()
    pricer = Pricer(step, machine(workers=workers))
    for config in candidates(step, workers, Request()):
        with contextlib.suppress(Diagnostic):
            memory, prediction = pricer.price(config)
            found[config] = memory.peak, prediction.price(EXPECTED_STEPS)
    return found


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize(
    ("rows", "width", "hidden", "workers"), [(8, 4, 16, 4), (6, 64, 64, 6), (64, 2048, 8192, 3), (3, 64, 512, 2)]
)
def test_the_plan_is_that_of_pricing_every_candidate(
    rows: int, width: int, hidden: int, workers: int, share: float
) -> None:
    """Also where collectives take long to begin, and where memory is enough for this share of all plans."""
    step, where, priced = dense(rows, width, hidden), machine(workers=workers), priced_of(rows, width, hidden, workers)
    peaks = sorted(peak for peak, _ in priced.values())
    most = peaks[int(share * len(peaks))]
    prices = {config: price for config, (peak, price) in priced.items() if peak <= most}
    equal = [config for config, price in prices.items() if price <= min(prices.values()) * (1 + TIE)]
    found = search.search(step, replace(where, memory=most), Request(), pool=InProcessPool()).search_result
    assert found.selected == min(equal, key=simplicity)
    assert sum(1 + each.others for each in found.candidates) == len(candidates(step, workers, Request()))


@pytest.mark.parametrize("enough", [0, 4])
def test_a_long_search_ends_with_what_it_may_have_missed(
    enough: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, where = dense(64, 2048, 8192), machine(workers=8)
    patient = search.search(step, where, Request(), pool=InProcessPool()).search_result
    monkeypatch.setattr(evaluation_module, "ENOUGH", enough)
    monkeypatch.setattr(evaluation_module, "MORE", 0.02)
    with caplog.at_level(logging.INFO, logger="moaic"):
        hasty = search.search(step, where, Request(), pool=InProcessPool()).search_result
    told = re.search(r"(\d+) candidates were not priced, .* by (\d+) % at most", caplog.text)
    assert told is not None
    reason = re.compile(r"but another plan takes .*, and \d+ plans had been looked into")
    left = [each for each in hasty.candidates if reason.search(each.dropped)]
    assert 0 < int(told[1]) <= sum(1 + each.others for each in left)
    best, known = (found.of(found.selected).price(EXPECTED_STEPS) for found in (patient, hasty))
    assert known <= best * (1 + TIE) * (1.01 + int(told[2]) / 100)
    assert sum(each.memory is not None for each in hasty.candidates) < sum(
        each.memory is not None for each in patient.candidates
    )
