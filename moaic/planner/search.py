"""Selection of a plan: enumerate candidates, compile those that may be best, keep those that fit, take the fastest.

Predictions that differ by less than their error count as equal, and the simplest of equals wins, so that the plan does
not change between runs.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.specialize import in_example
from moaic.passes.build import build
from moaic.passes.config import Config, Request, simplicity
from moaic.passes.estimate.lower_bound import Alone, Bounds, alone
from moaic.passes.estimate.memory import Memory, fused_functions, held_peak, split_peak
from moaic.passes.estimate.step_time import EXPECTED_STEPS, Prediction
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import check_programs
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.planner import log
from moaic.planner.candidates import candidates, relaxed
from moaic.planner.memory_fit import frugal
from moaic.planner.worker import Compiled, CompilerPool, InProcessPool
from moaic.text.units import mib

NOT_NEEDED = "it would save memory that is not short"

TIE = 0.02
"""Relative difference from the best price up to which prices count as equal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, dropped with a reason or possible with a prediction."""

    config: Config
    memory: Memory | None = None
    prediction: Prediction | None = None
    dropped: str = ""
    crash: str = ""
    """Trace of the bug of moaic for which it is dropped."""

    @property
    def outcome(self) -> str:
        return self.dropped or "possible"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every candidate of a step, and which of them was selected."""

    candidates: tuple[Candidate, ...]
    selected: Config
    apart: int = 0
    """Peak bytes per worker of the selected plan if forward and backward run as two programs."""
    held: int = 0
    """Peak bytes per worker if they run as one program while the user holds all outputs."""
    steps: int = EXPECTED_STEPS
    """Steps over which the time to compile was spread."""

    def of(self, config: Config) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.config == config)

    @property
    def ranked(self) -> list[Candidate]:
        """Possible candidates, the selected one first, then by price."""
        possible = [candidate for candidate in self.candidates if candidate.prediction is not None]
        return sorted(possible, key=lambda each: (each.config != self.selected, _price(each, self.steps)))


class NoPlanFits(Diagnostic):
    """No candidate fits in memory; candidates and request are kept for advice."""

    def __init__(self, message: str, candidates: Sequence[Candidate], request: Request) -> None:
        super().__init__(message)
        self.candidates = candidates
        self.request = request


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected plan, and the outcome of all candidates."""

    plan: Plan
    search_result: SearchResult
    machine: Machine


def search(
    step: Module, machine: Machine, request: Request, *, pool: CompilerPool, steps: int = EXPECTED_STEPS
) -> Selection:
    """The best plan for `steps` runs of `step` on `machine` that keeps to `request`.

    Candidates are compiled for the sizes of the example, in a third of the time that open sizes take; these only the
    selected plan gets. Raises Diagnostic where the request is impossible and where no candidate can be compiled,
    NoPlanFits where none fits.
    """
    wanted = relaxed(step, request)
    if wanted != request:
        log.batch_split_otherwise(step)
    log.without_rule(step)
    configs = candidates(step, machine.workers, wanted)
    log.candidates_counted(len(configs))
    compilers = pool if len(configs) > 1 else InProcessPool()
    example = in_example(step)
    rejected: dict[Config, Candidate] = {}
    while True:
        found = _evaluated(example, [each for each in configs if each not in rejected], compilers, machine, steps)
        if all(candidate.dropped for candidate in found):
            raise _impossible([*found, *rejected.values()], machine, wanted)
        search_result = _select(found, steps)
        plan = _well_formed(step, search_result.selected, machine)
        if isinstance(plan, Plan):
            return _finish(step, machine, replace(search_result, candidates=(*found, *rejected.values())), plan)
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
        return _crashed(config, traceback.format_exc())
    return plan


def _evaluated(
    step: Module, configs: Sequence[Config], pool: CompilerPool, machine: Machine, steps: int
) -> list[Candidate]:
    """Every candidate with its outcome; logs the phases."""
    log.compiling()
    work = _Search(step, configs, pool, machine, steps)
    found = work.run()
    log.compiled(work.compiling, sum(not candidate.dropped for candidate in found))
    _log_crashes(found)
    for candidate in found:
        if candidate.dropped:
            log.dropped(candidate.config, candidate.dropped)
    log.selecting()
    log.costed(work.costing)
    return found


def _finish(step: Module, machine: Machine, search_result: SearchResult, plan: Plan) -> Selection:
    fused = fused_functions()
    usual = plan.in_example()
    found = replace(search_result, apart=split_peak(usual, fused), held=held_peak(usual, fused))
    return _logged(step, Selection(plan, found, machine))


def again(step: Module, machine: Machine, search_result: SearchResult) -> Selection:
    """The selection of an earlier search, with its plan built again; logs it."""
    return _logged(
        step, Selection(build(step, search_result.selected, coefficients_of(machine)), search_result, machine)
    )


def _logged(step: Module, selection: Selection) -> Selection:
    search_result, memory = selection.search_result, selection.machine.memory
    chosen = search_result.of(search_result.selected)
    assert chosen.memory is not None
    assert chosen.prediction is not None
    log.selected(step, chosen.config, chosen.memory, chosen.prediction)
    log.spent(chosen.prediction)
    for other in search_result.ranked[1:2]:
        assert other.prediction is not None
        ratio = _price(other, search_result.steps) / _price(chosen, search_result.steps)
        log.next_best(chosen.prediction, other.config, other.prediction, ratio if ratio > 1 + TIE else None)
    if search_result.apart > memory:
        log.split_does_not_fit(search_result.apart, memory)
    if search_result.held > memory:
        log.outputs_do_not_fit(search_result.held, memory)
    return selection


class _Search:
    """Compiles candidates in the order of their lower bounds, and leaves out those that cannot be the best."""

    def __init__(
        self, step: Module, configs: Sequence[Config], pool: CompilerPool, machine: Machine, steps: int
    ) -> None:
        self.step = step
        self.steps = steps
        self.configs = configs
        self.pool = pool
        self.machine = machine
        self.faster = _keeping_more(configs)
        self.found: dict[Config, Candidate] = {}
        self.too_large: set[Config] = set()
        self.best = math.inf
        """Price of the best plan so far, in seconds."""
        self.compiling = self.costing = 0.0
        """Seconds spent on compiling and on costing."""
        self.bounds = self._bounds() if len(configs) > 1 else Bounds({})
        if machine.made or len(configs) == 1:
            pool.begin(step, machine)

    def run(self) -> list[Candidate]:
        """Every candidate with its outcome."""
        while waiting := [config for config in self.configs if config not in self.found]:
            self._leave_out(waiting)
            self._evaluate(self._promising([config for config in waiting if config not in self.found]))
        if self.best == math.inf:
            self._evaluate(self._smallest())
        return [self.found[config] for config in self.configs]

    def _bounds(self) -> Bounds:
        """Lower bounds from the step on one device, with assumed kernels: compiled ones are no faster."""
        self.pool.begin(self.step, replace(self.machine, made={}))
        on_one = sorted(set(map(alone, self.configs)), key=simplicity)
        memories = {config: made.memory for config, made in self._compiled(on_one).items() if made.memory is not None}
        costs = self._costs(list(memories))
        return Bounds({config: Alone(costs[config].seconds.value, memory) for config, memory in memories.items()})

    def _leave_out(self, waiting: Sequence[Config]) -> None:
        """Drops every candidate that need not be compiled, with the reason."""
        for config in waiting:
            nbytes, seconds = self.bounds.nbytes(config), self.bounds.seconds(config)
            faster = [self.found[each] for each in self.faster[config] if each in self.found]
            if nbytes > self.machine.memory:
                self.too_large.add(config)
                self._drop(config, f"needs at least {mib(nbytes)} per worker, and there are {mib(self.machine.memory)}")
            elif seconds > self.best * (1 + TIE):
                self._drop(config, f"takes at least {_ms(seconds)}, and another plan takes {_ms(self.best)}")
            elif enough := [each for each in faster if each.config not in self.too_large]:
                self._drop(config, enough[0].dropped or NOT_NEEDED)

    def _drop(self, config: Config, reason: str) -> None:
        self.found[config] = Candidate(config, dropped=reason)

    def _promising(self, waiting: Sequence[Config]) -> list[Config]:
        """The candidates to compile next, which wait for no other outcome; at first those with the least bound."""
        ready = [config for config in waiting if all(each in self.found for each in self.faster[config])]
        if self.best < math.inf:
            return ready
        least = min(map(self.bounds.seconds, ready), default=0.0)
        return [config for config in ready if self.bounds.seconds(config) <= least * (1 + TIE)]

    def _smallest(self) -> list[Config]:
        """If nothing fits: dropped candidates that may need less than every compiled one, for the message."""
        sized = (each.memory.peak for each in self.found.values() if each.memory is not None)
        least = min(sized, default=math.inf)
        left_out = [config for config in self.configs if config in self.too_large and self.found[config].memory is None]
        return frugal(config for config in left_out if self.bounds.nbytes(config) < least)

    def _evaluate(self, configs: Sequence[Config]) -> None:
        """Compiles these candidates and predicts those that fit."""
        made = {
            config: _compiled_candidate(config, result, self.machine)
            for config, result in self._compiled(configs).items()
        }
        costs = self._costs([config for config, candidate in made.items() if not candidate.dropped])
        self.found.update((config, replace(each, prediction=costs.get(config))) for config, each in made.items())
        self.too_large.update(config for config, each in made.items() if each.dropped and each.memory is not None)
        self.best = min([self.best, *(cost.price(self.steps) for cost in costs.values())])

    def _compiled(self, configs: Sequence[Config]) -> dict[Config, Compiled]:
        start = time.perf_counter()
        made = dict(zip(configs, self.pool.compile(configs), strict=True))
        self.compiling += time.perf_counter() - start
        return made

    def _costs(self, configs: Sequence[Config]) -> dict[Config, Prediction]:
        start = time.perf_counter()
        costs = dict(zip(configs, self.pool.cost(configs), strict=True))
        self.costing += time.perf_counter() - start
        return costs


def _keeping_more(configs: Sequence[Config]) -> dict[Config, list[Config]]:
    """For each candidate its faster relatives: saved activations, gathered keys, fewer micro-batches or chunks.

    A candidate is worth compiling only if all of these are too large. A pipeline keeps its number of micro-batches.
    """
    known = set(configs)
    fewer = _next_fewer(configs, "micro_batches") | _next_fewer(configs, "loss_chunks")

    def faster(config: Config) -> list[Config]:
        others = [replace(config, recompute="saved"), replace(config, gather_keys=True)]
        found = [each for each in others if each != config and each in known]
        parts = fewer.get((config, "micro_batches")) if config.pp == 1 else None
        return [*found, *(each for each in (parts, fewer.get((config, "loss_chunks"))) if each is not None)]

    return {config: faster(config) for config in configs}


def _next_fewer(configs: Sequence[Config], name: str) -> dict[tuple[Config, str], Config]:
    """For each candidate the one that differs only in the next smaller value of `name`."""
    alike: dict[Config, list[Config]] = defaultdict(list)
    for config in sorted(configs, key=lambda each: getattr(each, name)):
        alike[replace(config, **{name: 1})].append(config)
    return {(more, name): less for found in alike.values() for less, more in pairwise(found)}


def _compiled_candidate(config: Config, result: Compiled, machine: Machine) -> Candidate:
    if result.crash:
        return _crashed(config, result.crash)
    if result.memory is not None and result.memory.peak > machine.memory:
        return Candidate(config, result.memory, dropped=f"needs {_per_worker(result.memory.peak, machine)}")
    return Candidate(config, result.memory, dropped=result.dropped)


def _crashed(config: Config, trace: str) -> Candidate:
    return Candidate(config, dropped=trace.strip().rpartition("\n")[2], crash=trace)


def _log_crashes(found: Sequence[Candidate]) -> None:
    """Logs each crash once, with all candidates that it hit."""
    crashes: dict[str, list[Config]] = {}
    for candidate in found:
        if candidate.crash:
            crashes.setdefault(candidate.crash, []).append(candidate.config)
    for trace, configs in crashes.items():
        log.crashed(configs, trace)


def _select(found: Sequence[Candidate], steps: int) -> SearchResult:
    possible = [candidate for candidate in found if candidate.prediction is not None]
    prices = {candidate.config: _price(candidate, steps) for candidate in possible}
    best = min(prices.values())
    equal = [config for config, price in prices.items() if price <= best * (1 + TIE)]
    return SearchResult(tuple(found), min(equal, key=simplicity), steps=steps)


def _price(candidate: Candidate, steps: int) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.price(steps)


def _impossible(found: Sequence[Candidate], machine: Machine, request: Request) -> Diagnostic:
    """The error if no candidate is left: too little memory if that dropped any, else the reason of the simplest."""
    sized = [(candidate.memory.peak, candidate.config) for candidate in found if candidate.memory is not None]
    if sized:
        least, config = min(sized)
        return NoPlanFits(
            f"no plan fits: the smallest of {len(found)}, {config}, needs {mib(least)} per worker, and there are "
            f"{mib(machine.memory)}",
            found,
            request,
        )
    reasons = list(dict.fromkeys(candidate.dropped for candidate in found))
    context = "\n".join(f"  {reason}" for reason in reasons[1:])
    return Diagnostic(reasons[0], context=f"other plans are not possible either:\n{context}" if context else "")


def _per_worker(nbytes: int, machine: Machine) -> str:
    return f"{mib(nbytes)} per worker, and there are {mib(machine.memory)}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
