"""Selection of a plan: enumerate candidates, compile those that may be best, keep those that fit, take the fastest.

Predictions that differ by less than their error count as equal, and the simplest of equals wins, so that the plan does
not change between runs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.specialize import in_example
from moaic.passes.build import build
from moaic.passes.config import Config, Request
from moaic.passes.estimate.memory import fused_functions, held_peak, split_peak
from moaic.passes.estimate.step_time import EXPECTED_STEPS
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import check_programs
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.planner import log
from moaic.planner.autotune import Autotune
from moaic.planner.candidates import CandidateSpace, candidate_space, relaxed
from moaic.planner.evaluation import Evaluation
from moaic.planner.measured import MeasureKernels, Remeasured, kernels_of, measured
from moaic.planner.outcome import TIE, Candidate, SearchResult, crashed, simplest_of_equals
from moaic.planner.stage_speeds import speeds_of
from moaic.planner.worker import CompilerPool, InProcessPool
from moaic.text.units import mib


class NoPlanFits(Diagnostic):
    """No candidate fits in memory; candidates and request are kept for advice."""

    def __init__(self, message: str, candidates: Sequence[Candidate], request: Request) -> None:
        super().__init__(message)
        self.candidates = candidates
        self.request = request


@dataclass(frozen=True)
class Selection:
    """The selected plan, and the outcome of all candidates."""

    search_result: SearchResult
    machine: Machine
    make_plan: Callable[[], Plan]

    @cached_property
    def plan(self) -> Plan:
        """The selected plan; unless it was built to be checked, it is on first use."""
        return self.make_plan()


def search(
    step: Module,
    machine: Machine,
    request: Request,
    *,
    pool: CompilerPool,
    steps: int = EXPECTED_STEPS,
    measure: MeasureKernels | None = None,
    autotune: Autotune | None = None,
    runs: bool = True,
) -> Selection:
    """The best plan for `steps` runs of `step` on `machine` that keeps to `request`.

    Candidates are compiled for the sizes of the example, in a third of the time that open sizes take; these only the
    selected plan gets. `measure` measures kernels of the best ones, instead of what `machine` knows of them, and
    `autotune` runs the best of all. Unless the selected plan `runs`, it is neither built nor checked here. Raises
    Diagnostic where the request is impossible and where no candidate can be compiled, NoPlanFits where none fits.
    """
    measure = measure or kernels_of(machine)
    # Bounds are made of rates.
    machine = replace(machine, kernels=None)
    wanted = relaxed(step, request)
    if wanted != request:
        log.batch_split_otherwise(step)
    log.without_rule(step)
    speeds = speeds_of(in_example(step), machine)
    machine = machine if speeds is None else speeds.machine
    space = candidate_space(step, machine.workers, wanted, speeds)
    log.candidates_counted(space.total)
    compilers = pool if space.total > 1 else InProcessPool()
    example = in_example(step)
    rejected: dict[Config, Candidate] = {}
    while True:
        found = _evaluated(example, space.without(rejected), compilers, machine, steps)
        if all(candidate.dropped for candidate in found):
            raise _impossible([*found, *rejected.values()], wanted)
        remeasured = Remeasured(found, machine)
        if measure is not None:
            remeasured = measured(example, found, machine, steps, measure)
        search_result = replace(_select(remeasured.candidates, steps), is_final=remeasured.is_final)
        if autotune is not None:
            search_result = autotune(example, search_result, machine)
        if not runs:
            return again(step, remeasured.machine, search_result)
        plan = _well_formed(step, search_result.selected, machine)
        if isinstance(plan, Plan):
            candidates = (*search_result.candidates, *rejected.values())
            return _finish(step, remeasured.machine, replace(search_result, candidates=candidates), plan)
        # Search again without it: candidates that were dropped because this one is better may be selected now.
        rejected[plan.config] = plan
        _log_crashes([plan])


def _well_formed(step: Module, config: Config, machine: Machine) -> Plan | Candidate:
    """The plan of a configuration, or the candidate dropped because it cannot be built or a program is malformed."""
    try:
        plan = build(step, config, coefficients_of(machine))
    except Diagnostic as error:  # of open sizes alone: for those of the example it was built before
        return Candidate(config, dropped=error.message)
    try:
        check_programs(plan.programs)
    except RuntimeError:
        return crashed(config, traceback.format_exc())
    return plan


def _evaluated(
    step: Module, space: CandidateSpace, pool: CompilerPool, machine: Machine, steps: int
) -> list[Candidate]:
    """Every candidate with its outcome; logs the phases."""
    log.compiling()
    work = Evaluation(step, space, pool, machine, steps)
    found = work.run()
    log.compiled(work.compiling, sum(not candidate.dropped for candidate in found))
    if promising := work.promising:
        log.ended_early(len(promising), max(promising))
    _log_crashes(found)
    for candidate in found:
        if candidate.dropped:
            log.dropped(candidate.told, candidate.dropped)
    log.selecting()
    log.costed(work.costing)
    return found


def _finish(step: Module, machine: Machine, search_result: SearchResult, plan: Plan) -> Selection:
    fused = fused_functions()
    usual = plan.in_example()
    found = replace(search_result, apart=split_peak(usual, fused), held=held_peak(usual, fused))
    return _logged(step, Selection(found, machine, lambda: plan))


def again(step: Module, machine: Machine, search_result: SearchResult) -> Selection:
    """The selection of a search, or of an earlier one, whose plan is built on first use; logs it."""
    make_plan = partial(build, step, search_result.selected, coefficients_of(machine))
    return _logged(step, Selection(search_result, machine, make_plan))


def _logged(step: Module, selection: Selection) -> Selection:
    search_result, memory = selection.search_result, selection.machine.memory
    chosen = search_result.of(search_result.selected)
    assert chosen.memory is not None
    assert chosen.prediction is not None
    log.selected(step, chosen.config, chosen.memory, chosen.prediction)
    log.spent(chosen.prediction)
    if chosen.seconds is not None:
        log.fastest(chosen.seconds)
    for other in search_result.ranked[1:2]:
        assert other.prediction is not None
        ratio = other.price(search_result.steps) / chosen.price(search_result.steps)
        if other.seconds is not None:
            log.next_fastest(other.config, ratio)
        else:
            log.next_best(chosen.prediction, other.config, other.prediction, ratio if ratio > 1 + TIE else None)
    if search_result.apart > memory:
        log.split_does_not_fit(search_result.apart, memory)
    if search_result.held > memory:
        log.outputs_do_not_fit(search_result.held, memory)
    return selection


def _log_crashes(found: Sequence[Candidate]) -> None:
    """Logs each crash once, with all candidates that it hit."""
    crashes: dict[str, list[Config]] = {}
    for candidate in found:
        if candidate.crash:
            crashes.setdefault(candidate.crash, []).append(candidate.config)
    for trace, configs in crashes.items():
        log.crashed(configs, trace)


def _select(found: Sequence[Candidate], steps: int) -> SearchResult:
    selected = simplest_of_equals(found, steps)
    assert selected is not None
    return SearchResult(tuple(found), selected, steps=steps)


def _impossible(found: Sequence[Candidate], request: Request) -> Diagnostic:
    """The error if no candidate is left: too little memory if that dropped any, else the reason of the simplest."""
    sized = [(each.memory.peak, each.config, each.memory.limit) for each in found if each.memory is not None]
    if sized:
        (least, config, limit), count = min(sized), sum(1 + each.others for each in found)
        return NoPlanFits(
            f"no plan fits: the smallest of {count}, {config}, needs {mib(least)} per worker, and there are "
            f"{mib(limit)}",
            found,
            request,
        )
    reasons = list(dict.fromkeys(candidate.dropped for candidate in found))
    context = "\n".join(f"  {reason}" for reason in reasons[1:])
    return Diagnostic(reasons[0], context=f"other plans are not possible either:\n{context}" if context else "")
