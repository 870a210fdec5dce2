"""What was measured decides between the candidates that are predicted to be best."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from moaic.ir.graph import Function
from moaic.ir.parser import parse
from moaic.passes.config import Config, Request
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf import machine_text
from moaic.passes.perf.kernel_text import kernel_text
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.planner import plan_cache, search
from moaic.planner.autotune import Autotune
from moaic.planner.measured import MOST, NEAR, MeasureKernels
from moaic.planner.search import Selection
from moaic.planner.worker import InProcessPool
from tests.passes.steps import dense, machine
from tests.planner.scripted import SMALL, Scripted

LARGE = dense(256, 128, 512)
"""0.13 s on one of the machine's workers, in products whose dims all differ."""


class Measures:
    """Measures kernels: as they are expected, the ones that `slow` says so many times slower."""

    def __init__(self, slow: Mapping[str, float] | None = None) -> None:
        self.slow = slow or {}
        self.expected: dict[str, float] = {}

    def __call__(self, expected: Mapping[str, float]) -> dict[str, Number]:
        self.expected |= expected
        return {
            text: Number(self.slow.get(text, 1.0) * seconds, MeasureSource.MEASURED)
            for text, seconds in expected.items()
        }


def searched(measure: Measures | None = None, autotune: Autotune | None = None) -> Selection:
    return search.search(LARGE, machine(), SMALL, pool=InProcessPool(), measure=measure, autotune=autotune)


def test_kernels_that_take_as_long_as_expected_change_nothing() -> None:
    measure = Measures()
    before, found = searched(), searched(measure)
    assert before.search_result.selected == found.search_result.selected
    for each in found.search_result.ranked:
        if each.is_measured:
            assert each.prediction is not None
            was = before.search_result.of(each.config).prediction
            assert was is not None
            assert each.prediction.seconds.value == pytest.approx(was.seconds.value)


def test_the_kernels_that_are_measured_are_those_of_the_best() -> None:
    measure = Measures()
    ranked = searched(measure).search_result.ranked
    prices = [each.price(1000) for each in ranked if each.is_measured]
    assert 1 < len(prices) <= MOST
    assert max(prices) <= NEAR * min(prices)
    assert {function(text).ops[0].name for text in measure.expected} == {"aten.mm"}
    # Half of the rows, columns or inner elements of a product of 256 x 128 x 512.
    assert all(seconds == pytest.approx(256 * 128 * 512 / 1e9) for seconds in measure.expected.values())


def test_a_plan_of_slow_kernels_is_not_selected() -> None:
    first = searched(Measures()).search_result.selected
    of_first = Measures()
    request = Request(recompute="saved", dp=first.dp, tp=first.tp, pp=1, cp=1, ep=1, micro_batches=1)
    search.search(LARGE, machine(), request, pool=InProcessPool(), measure=of_first)
    slow = Measures(dict.fromkeys(of_first.expected, 50.0))
    found = searched(slow).search_result
    assert found.selected != first
    assert found.of(found.selected).is_measured
    assert found.of(first).price(1000) > 10 * found.of(found.selected).price(1000)


def test_candidates_without_measurements_do_not_win_over_those_that_have_them() -> None:
    """All kernels turn out slow: the prices by rates of the others are no better for that."""
    measure = Measures()
    searched(measure)
    found = searched(Measures(dict.fromkeys(measure.expected, 2.0))).search_result
    assert found.of(found.selected).is_measured
    assert any(not each.is_measured and each.price(1000) < found.ranked[0].price(1000) for each in found.ranked)


def test_short_steps_are_not_measured() -> None:
    measure = Measures()
    search.search(dense(), machine(), SMALL, pool=InProcessPool(), measure=measure)
    assert not measure.expected


def test_the_selection_knows_what_was_measured(tmp_path: Path) -> None:
    """So does its text, and the plan is found again on a machine that knows more or fewer kernels."""
    measure = Measures()
    found = plan_cache.search_cached(LARGE, machine(), SMALL, pool=InProcessPool(), folder=tmp_path, measure=measure)
    assert found.machine.kernels is not None
    assert set(found.machine.kernels) == set(measure.expected)
    assert machine_text.from_text(machine_text.to_text(found.machine)) == found.machine
    again = plan_cache.search_cached(LARGE, machine(), SMALL, pool=Scripted({}), folder=tmp_path, measure=measure)
    assert again.search_result == found.search_result


def test_what_could_not_be_measured_now_is_not_kept(tmp_path: Path) -> None:
    """Nothing measured at another time would ever be asked for, else."""

    def found(measure: MeasureKernels) -> Selection:
        return plan_cache.search_cached(LARGE, machine(), SMALL, pool=InProcessPool(), folder=tmp_path, measure=measure)

    found(lambda expected: None)
    assert not [*tmp_path.iterdir()]
    found(lambda expected: {})
    assert [*tmp_path.iterdir()]


def test_a_machine_that_brings_its_kernels_is_planned_for_with_them() -> None:
    """As one is that `moaic calibrate` has written. Bounds and the prices of others are those of its rates."""
    measure = Measures()
    searched(measure)
    slow = Measures(dict.fromkeys(measure.expected, 2.0))
    found = searched(slow)
    there = search.search(LARGE, found.machine, SMALL, pool=InProcessPool())
    assert there.search_result == found.search_result
    assert there.machine == found.machine
    # Kernels of other sizes are no help.
    other = search.search(dense(512, 128, 512), found.machine, SMALL, pool=InProcessPool())
    assert not any(each.is_measured for each in other.search_result.candidates)


def function(text: str) -> Function:
    (found,) = parse(text).functions
    return found


def test_a_kernel_is_known_by_what_it_computes() -> None:
    text = """// moai 1
func @f(%a: f32[2, 3] param "a", %b: f32[3, 4] input "b") -> (f32[2, 4], f32[2, 4]) {
  %c = aten.mm %a, %b : f32[2, 4] at "x.py":1 forward
  %d = aten.mm %a, %b : f32[2, 4] at "y.py":2 in "body" backward
  return %c, %d
}
"""
    first, second = function(text).ops
    assert kernel_text(first) == kernel_text(second)
    wider = function(text.replace("4]", "5]")).ops[0]
    assert kernel_text(first) != kernel_text(wider)
    alone = function(kernel_text(first))
    assert [param.type for param in alone.params] == [value.type for value in first.inputs()]
    assert kernel_text(alone.ops[0]) == kernel_text(first)


FAST, SLOW, SLOWER = Config(dp=2), Config(tp=2), Config(cp=2)
PREDICTED = {FAST: 1.0, SLOW: 1.5, SLOWER: 2.0}


def autotuned(count: int, seconds: Mapping[Config, float], ran: list[Config]) -> Selection:
    def run(plan: Plan, expected: float) -> float | str:
        assert expected == PREDICTED[plan.config]
        ran.append(plan.config)
        return seconds.get(plan.config, "no memory")

    pool = Scripted({FAST: 1.0, SLOW: 1.5})
    return search.search(dense(), machine(), SMALL, pool=pool, autotune=Autotune(count, run))


def test_the_plan_that_ran_fastest_is_selected(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[Config] = []
    with caplog.at_level(logging.INFO, "moaic"):
        found = autotuned(2, {FAST: 1.4, SLOW: 1.3}, ran)
    assert ran == [FAST, SLOW]
    assert found.plan.config == SLOW
    assert [each.seconds for each in found.search_result.ranked] == [1.3, 1.4]
    assert "Autotune: the best 2 candidates run for a few steps." in caplog.messages
    assert "Autotune: tp=2 takes 1300 [ms] a step, and 1500 were predicted." in caplog.messages
    assert caplog.messages[-2:] == [
        "It took 1300 [ms] a step when the best plans ran.",
        "Next best: dp=2, which took 1.08 x as long.",
    ]


def test_a_plan_that_cannot_run_is_not_selected(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "moaic"):
        assert autotuned(2, {SLOW: 1.3}, []).plan.config == SLOW
    assert "Autotune: dp=2 cannot run here: no memory" in caplog.messages


def test_the_simplest_of_those_that_run_as_fast_is_selected() -> None:
    assert autotuned(2, {FAST: 1.31, SLOW: 1.3}, []).plan.config == FAST


def test_where_nothing_can_run_the_prediction_decides() -> None:
    assert autotuned(5, {}, []).plan.config == FAST


def test_one_possible_plan_does_not_run() -> None:
    ran: list[Config] = []
    pool = Scripted({FAST: 1.0})
    tuner = Autotune(3, lambda plan, _: ran.append(plan.config) or 1.0)
    assert search.search(dense(), machine(), SMALL, pool=pool, autotune=tuner).plan.config == FAST
    assert not ran


def test_what_ran_is_found_again_and_does_not_run_twice(tmp_path: Path) -> None:
    ran: list[Config] = []

    def run(plan: Plan, expected: float) -> float | str:
        ran.append(plan.config)
        return 2.0 if plan.config == FAST else 1.0

    def found(count: int) -> Config:
        pool = Scripted({FAST: 1.0, SLOW: 1.5})
        tuner = Autotune(count, run)
        result = plan_cache.search_cached(dense(), machine(), SMALL, pool=pool, folder=tmp_path, autotune=tuner)
        return result.plan.config

    assert [found(2), found(2)] == [SLOW, SLOW]
    assert len(ran) == 2
    tuned_otherwise = Autotune(2, run, "op by op")
    pool = Scripted({FAST: 1.0, SLOW: 1.5})
    plan_cache.search_cached(dense(), machine(), SMALL, pool=pool, folder=tmp_path, autotune=tuned_otherwise)
    assert len(ran) == 4
    without = plan_cache.search_cached(
        dense(), machine(), SMALL, pool=Scripted({FAST: 1.0, SLOW: 1.5}), folder=tmp_path
    )
    assert without.plan.config == FAST


def test_an_optimizer_that_did_not_run_counts_as_predicted() -> None:
    found = search.search(
        LARGE, machine(), SMALL, pool=InProcessPool(), autotune=Autotune(2, lambda plan, expected: 1.0)
    )
    for each in found.search_result.ranked[:2]:
        assert each.prediction is not None
        assert each.seconds == pytest.approx(1.0 + each.prediction.of("optimizer"))
        assert replace(each, seconds=None).price(1000) != each.seconds
