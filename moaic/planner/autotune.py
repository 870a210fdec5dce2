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
from moaic.planner.outcome import Candidate, SearchResult, simplest

RunPlan = Callable[[Plan, float], float | str]
"""Returns the seconds of a step of a plan without its optimizer, given those expected, or why it cannot run."""


@dataclass(frozen=True, slots=True)
class Autotune:
    """How many of the best candidates run, and how."""

    count: int
    run: RunPlan
    mode: str = ""
    """What else than the plan decides how long it takes, such as whether functions are compiled."""

    def __call__(self, step: Module, found: SearchResult, machine: Machine) -> SearchResult:
        """The result with the candidate selected that ran fastest, or the simplest of those that ran as fast.

        As it was where there is one candidate, and where none could run.
        """
        tried = found.ranked[: self.count]
        if len(tried) < 2:
            return found
        log.autotuning(len(tried))
        ran = {each.config: self._ran(step, each, machine) for each in tried}
        selected = simplest({each.config: each.seconds for each in ran.values() if each.seconds is not None})
        candidates = tuple(ran.get(each.config, each) for each in found.candidates)
        return found if selected is None else replace(found, candidates=candidates, selected=selected)

    def _ran(self, step: Module, candidate: Candidate, machine: Machine) -> Candidate:
        """The candidate with the seconds that it took: what is predicted for the optimizer, which is no part of it."""
        assert candidate.prediction is not None
        predicted, optimizer = candidate.prediction.seconds.value, candidate.prediction.of("optimizer")
        try:
            seconds = self.run(build(step, candidate.config, coefficients_of(machine)), predicted)
        except Diagnostic as error:
            seconds = error.message
        if isinstance(seconds, str):
            log.cannot_run(candidate.config, seconds)
            return candidate
        log.ran(candidate.config, seconds + optimizer, predicted)
        return replace(candidate, seconds=seconds + optimizer)
