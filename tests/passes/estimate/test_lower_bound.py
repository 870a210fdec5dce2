from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from statistics import median

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import load
from moaic.passes.build import Builder
from moaic.passes.config import Config, Request
from moaic.passes.estimate.lower_bound import Alone, Bounds, sharded_bytes
from moaic.passes.estimate.memory import FusedFunctions, Memory, fused_functions, memory_of
from moaic.passes.estimate.step_time import function_seconds, predict
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.planner.candidates import candidates
from tests.passes.steps import dense, machine


class Prices:
    """What plans of a step take."""

    def __init__(self, step: Module, where: Machine) -> None:
        self.builder = Builder(step, coefficients_of(where))
        self.machine = where
        self.fused: FusedFunctions = fused_functions()

    def of(self, config: Config) -> Alone:
        plan: Plan = self.builder.build(config)
        prediction = predict(plan, self.machine, function_seconds(self.machine, self.fused))
        return Alone(
            prediction.seconds.value,
            memory_of(plan, self.fused),
            prediction.of("optimizer"),
            prediction.compiling,
            prediction.of("launch"),
        )


@pytest.mark.parametrize(
    ("sizes", "workers"),
    [((64, 16, 32), 2), pytest.param((4096, 64, 256), 4, marks=pytest.mark.exact)],
    ids=["small", "large"],
)
def test_no_plan_takes_less_than_its_bound(sizes: tuple[int, int, int], workers: int) -> None:
    step, where = dense(*sizes), machine(workers=workers)
    prices = Prices(step, where)
    bounds = Bounds({each: prices.of(each) for each in (Config(), Config(recompute="full"))}, where)
    compared = 0
    for config in candidates(step, workers, Request()):
        try:
            found = prices.of(config)
        except Diagnostic:
            continue
        compared += 1
        # A stage sends its gradients on before it makes those of its own first layer: here that is half of a stage.
        assert bounds.seconds(config) <= found.seconds * (1.0001 if config.pp == 1 else 1.15), config
        assert bounds.nbytes(config) <= found.memory.peak, config
    assert compared > 20


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_shards_other_parameters_needs_no_less_than_its_bound(schedule: str) -> None:
    """A bound that is taken from the memory of a plan that differs only in the parameters that it shards."""
    prices = Prices(dense(64, 256, 256), machine(workers=4))
    near: list[float] = []
    for mesh in (Config(dp=2, pp=2, schedule=schedule), Config(dp=4), Config(dp=2, tp=2)):
        for parts in (1, 4):
            plans = [
                replace(mesh, micro_batches=parts, distribute_param=level)
                for level in ("none", "optimizer", "step", "use")
            ]
            found: dict[Config, Memory] = {}
            for each in plans:
                with suppress(Diagnostic):
                    found[each] = prices.of(each).memory
            for known, other in permutations(found, 2):
                bound = sharded_bytes(known, found[known], other)
                assert bound <= found[other].peak, (known, other)
                if bound > 0:
                    near.append(bound / found[other].peak)
    assert len(near) > 40
    assert median(near) > 0.7


def test_micro_batches_without_gradients_are_not_kept() -> None:
    """Whatever the schedule: a stage of an evaluation keeps nothing of a forward for a backward."""
    step = load("""// moai 1
func @step(%x: f32[4096, 256] input "x", %a: f32[256, 256] param "a", %b: f32[256, 2] param "b")
    -> (f32[4096, 2] output "y") {
  %u = aten.mm %x, %a : f32[4096, 256] forward
  %v = aten.relu %u : f32[4096, 256] forward
  %w = aten.mm %v, %a : f32[4096, 256] forward
  %y = aten.mm %w, %b : f32[4096, 2] forward
  return %y
}
""")
    prices = Prices(step, machine(workers=4))
    bounds = Bounds({Config(): prices.of(Config())}, prices.machine)
    compared = 0
    for config in candidates(step, 4, Request(schedule="gpipe")):
        with suppress(Diagnostic):
            assert bounds.nbytes(config) <= prices.of(config).memory.peak, config
            compared += 1
    assert compared > 5


def test_what_is_not_known_bounds_nothing() -> None:
    bounds = Bounds({}, machine())
    assert (bounds.seconds(Config(dp=2)), bounds.nbytes(Config(dp=2))) == (0.0, 0)


def test_all_of_a_pipeline_of_few_micro_batches_waits_but_the_optimizer() -> None:
    whole = Prices(dense(), machine()).of(Config())
    bounds = Bounds({Config(): whole}, machine())
    half, piped = (bounds.seconds(config) for config in (Config(dp=2), Config(pp=2, micro_batches=2)))
    assert half == pytest.approx(whole.seconds / 2)
    assert piped == pytest.approx((1.5 * (whole.seconds - whole.optimizer) + whole.optimizer) / 2)
