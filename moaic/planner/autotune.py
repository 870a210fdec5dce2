"""The best candidates run, and the fastest selected: what was measured decides, whatever was predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.build import build
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.planner import log
from moaic.planner.outcome import Candidate, SearchResult

RunPlan = Callable[[Plan, float], float | None]
"""Returns the seconds of a step of a plan without its optimizer, given those expected; None where it cannot run."""


@dataclass(frozen=True, slots=True)
class Autotune:
    """How many of the best candidates run, and how."""

    count: int
    run: RunPlan

    def __call__(self, step: Module, found: SearchResult, machine: Machine) -> SearchResult:
        """The result with the candidate selected that ran fastest; as it was where fewer than two could run."""
        tried = found.ranked[: self.count]
        if len(tried) < 2:
            return found
        log.autotuning(len(tried))
        ran = {each.config: self._ran(step, each, machine) for each in tried}
        timed = [each for each in ran.values() if each.seconds is not None]
        if not timed:
            return found
        fastest = min(timed, key=lambda each: each.price(found.steps))
        candidates = tuple(ran.get(each.config, each) for each in found.candidates)
        return replace(found, candidates=candidates, selected=fastest.config)

    def _ran(self, step: Module, candidate: Candidate, machine: Machine) -> Candidate:
        """The candidate with the seconds that it took: what is predicted for the optimizer, which is no part of it."""
        assert candidate.prediction is not None
        predicted, optimizer = candidate.prediction.seconds.value, candidate.prediction.of("optimizer")
        try:
            seconds = self.run(build(step, candidate.config, coefficients_of(machine)), predicted)
        except Diagnostic:
            seconds = None
        seconds = None if seconds is None else seconds + optimizer
        log.ran(candidate.config, seconds, predicted)
        return replace(candidate, seconds=seconds)
