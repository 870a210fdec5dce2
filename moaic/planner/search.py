"""From a step to the selected plan: enumerate candidates, compile what may be best, keep what fits, take the fastest.

Predictions that differ by less than they can be trusted count as equal, and the simplest of equals wins: plans must not
flicker between runs.
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
from moaic.passes.build import build
from moaic.passes.config import Config, Request, simplicity
from moaic.passes.estimate.lower_bound import Alone, Bounds, alone
from moaic.passes.estimate.memory import Memory, fused_functions, held_peak, split_peak
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import check_programs
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.solver.costs import prices_of
from moaic.planner import log
from moaic.planner.candidates import candidates, relaxed
from moaic.planner.memory_fit import frugal
from moaic.planner.worker import Compiled, CompilerPool, Here
from moaic.text.units import mib

NOT_NEEDED = "it would save memory that is not short"

TIE = 0.02
"""Predicted times this near to the best, as a share of it, count as equal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and its fate: dropped with a reason, or predicted."""

    config: Config
    memory: Memory | None = None
    prediction: Prediction | None = None
    dropped: str = ""
    crash: str = ""
    """Trace of the bug of ours for which it is dropped."""

    @property
    def fate(self) -> str:
        return self.dropped or "possible"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every candidate of a step, and which of them was selected."""

    candidates: tuple[Candidate, ...]
    selected: Config
    apart: int = 0
    """Bytes that a worker needs under the selected plan where forward and backward run apart."""
    held: int = 0
    """The same where they run as one, and the program holds all outputs until then."""

    def of(self, config: Config) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.config == config)

    @property
    def ranked(self) -> list[Candidate]:
        """Possible candidates, the selected one first, then by predicted time: what to fall back on."""
        possible = [candidate for candidate in self.candidates if candidate.prediction is not None]
        return sorted(possible, key=lambda each: (each.config != self.selected, _seconds(each)))


class NoPlanFits(Diagnostic):
    """No candidate fits in memory. It has what is needed to say what would."""

    def __init__(self, message: str, candidates: Sequence[Candidate], request: Request) -> None:
        super().__init__(message)
        self.candidates = candidates
        self.request = request


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected plan, and what became of all candidates."""

    plan: Plan
    search_result: SearchResult
    machine: Machine


def search(step: Module, machine: Machine, request: Request, *, pool: CompilerPool) -> Selection:
    """The best plan for `step` on `machine` that keeps to `request`.

    Raises Diagnostic where the request is impossible and where no candidate can be compiled, NoPlanFits where none
    fits.
    """
    wanted = relaxed(step, request)
    if wanted != request:
        log.relaxed(step)
    log.without_rule(step)
    configs = candidates(step, machine.workers, wanted)
    log.candidates_counted(len(configs))
    workshop = pool if len(configs) > 1 else Here()
    spoilt: dict[Config, Candidate] = {}
    while True:
        found = _judged(step, [config for config in configs if config not in spoilt], workshop, machine)
        if all(candidate.dropped for candidate in found):
            raise _impossible([*found, *spoilt.values()], machine, wanted)
        search_result = _select(found)
        plan = build(step, search_result.selected, prices_of(machine))
        if not (crash := _malformed(plan)):
            return _finish(step, machine, replace(search_result, candidates=(*found, *spoilt.values())), plan)
        # Plans that were left out because this one is better are looked at after all.
        spoilt[plan.config] = _crashed(plan.config, crash)
        _say_crashes([spoilt[plan.config]])


def _malformed(plan: Plan) -> str:
    """Trace of what is wrong with the programs of a plan, which then must not run; empty for nothing."""
    try:
        check_programs(plan.programs)
    except RuntimeError:
        return traceback.format_exc()
    return ""


def _judged(step: Module, configs: Sequence[Config], pool: CompilerPool, machine: Machine) -> list[Candidate]:
    """Every candidate with its fate, said in the log."""
    log.compiling()
    work = _Search(step, configs, pool, machine)
    found = work.run()
    log.compiled(work.compiling, sum(not candidate.dropped for candidate in found))
    _say_crashes(found)
    for candidate in found:
        if candidate.dropped:
            log.dropped(candidate.config, candidate.dropped)
    log.selecting()
    log.costed(work.costing)
    return found


def _finish(step: Module, machine: Machine, search_result: SearchResult, plan: Plan) -> Selection:
    fused = fused_functions()
    found = replace(search_result, apart=split_peak(plan, fused), held=held_peak(plan, fused))
    return _said(step, Selection(plan, found, machine))


def again(step: Module, machine: Machine, search_result: SearchResult) -> Selection:
    """The plan of a selection that was made before, said in the log."""
    return _said(step, Selection(build(step, search_result.selected, prices_of(machine)), search_result, machine))


def _said(step: Module, selection: Selection) -> Selection:
    search_result, memory = selection.search_result, selection.machine.memory
    chosen = search_result.of(search_result.selected)
    assert chosen.memory is not None
    assert chosen.prediction is not None
    log.selected(step, chosen.config, chosen.memory, chosen.prediction)
    if search_result.apart > memory:
        log.split_does_not_fit(search_result.apart, memory)
    if search_result.held > memory:
        log.outputs_do_not_fit(search_result.held, memory)
    return selection


class _Search:
    """Compiles what may be the best by and by: the less a plan takes at least, the earlier."""

    def __init__(self, step: Module, configs: Sequence[Config], pool: CompilerPool, machine: Machine) -> None:
        self.step = step
        self.configs = configs
        self.pool = pool
        self.machine = machine
        self.faster = _keeping_more(configs)
        self.found: dict[Config, Candidate] = {}
        self.too_large: set[Config] = set()
        self.best = math.inf
        """Predicted seconds of the fastest plan so far."""
        self.compiling = self.costing = 0.0
        """Seconds spent on it."""
        self.bounds = self._bounds() if len(configs) > 1 else Bounds({})
        if machine.made or len(configs) == 1:
            pool.begin(step, machine)

    def run(self) -> list[Candidate]:
        """Every candidate with its fate."""
        while waiting := [config for config in self.configs if config not in self.found]:
            self._leave_out(waiting)
            self._look_at(self._promising([config for config in waiting if config not in self.found]))
        if self.best == math.inf:
            self._look_at(self._smallest())
        return [self.found[config] for config in self.configs]

    def _bounds(self) -> Bounds:
        """From the step on one device, with kernels as they are expected: those that were made do no less."""
        self.pool.begin(self.step, replace(self.machine, made={}))
        on_one = sorted(set(map(alone, self.configs)), key=simplicity)
        memories = {config: made.memory for config, made in self._compiled(on_one).items() if made.memory is not None}
        costs = self._costs(list(memories))
        return Bounds({config: Alone(costs[config].seconds.value, memory) for config, memory in memories.items()})

    def _leave_out(self, waiting: Sequence[Config]) -> None:
        """Says of every candidate that need not be compiled why."""
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
        """Of what must be compiled, all that need not wait for another's fate; at first only what takes least."""
        ready = [config for config in waiting if all(each in self.found for each in self.faster[config])]
        if self.best < math.inf:
            return ready
        least = min(map(self.bounds.seconds, ready), default=0.0)
        return [config for config in ready if self.bounds.seconds(config) <= least * (1 + TIE)]

    def _smallest(self) -> list[Config]:
        """Where nothing fits: what was left out and may need less than all that was compiled, to say what is wanted."""
        sized = (each.memory.peak for each in self.found.values() if each.memory is not None)
        least = min(sized, default=math.inf)
        left_out = [config for config in self.configs if config in self.too_large and self.found[config].memory is None]
        return frugal(config for config in left_out if self.bounds.nbytes(config) < least)

    def _look_at(self, configs: Sequence[Config]) -> None:
        """Compiles these, and predicts what fits."""
        made = {config: _fate(config, result, self.machine) for config, result in self._compiled(configs).items()}
        costs = self._costs([config for config, candidate in made.items() if not candidate.dropped])
        self.found.update((config, replace(each, prediction=costs.get(config))) for config, each in made.items())
        self.too_large.update(config for config, each in made.items() if each.dropped and each.memory is not None)
        self.best = min([self.best, *(cost.seconds.value for cost in costs.values())])

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
    """For each plan those that recompute less, gather keys, or have the next fewer micro-batches or chunks, else alike.

    These are faster, so it is worth a look only where all of them are too large. A pipeline needs its micro-batches.
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
    """For each plan, with `name`, the one that is alike but for the next smaller number of these."""
    alike: dict[Config, list[Config]] = defaultdict(list)
    for config in sorted(configs, key=lambda each: getattr(each, name)):
        alike[replace(config, **{name: 1})].append(config)
    return {(more, name): less for found in alike.values() for less, more in pairwise(found)}


def _fate(config: Config, result: Compiled, machine: Machine) -> Candidate:
    if result.crash:
        return _crashed(config, result.crash)
    if result.memory is not None and result.memory.peak > machine.memory:
        return Candidate(config, result.memory, dropped=f"needs {_per_worker(result.memory.peak, machine)}")
    return Candidate(config, result.memory, dropped=result.dropped)


def _crashed(config: Config, trace: str) -> Candidate:
    return Candidate(config, dropped=trace.strip().rpartition("\n")[2], crash=trace)


def _say_crashes(found: Sequence[Candidate]) -> None:
    """Each bug once, with all candidates that it hit."""
    crashes: dict[str, list[Config]] = {}
    for candidate in found:
        if candidate.crash:
            crashes.setdefault(candidate.crash, []).append(candidate.config)
    for trace, configs in crashes.items():
        log.crashed(configs, trace)


def _select(found: Sequence[Candidate]) -> SearchResult:
    possible = [candidate for candidate in found if candidate.prediction is not None]
    best = min(map(_seconds, possible))
    equal = [candidate.config for candidate in possible if _seconds(candidate) <= best * (1 + TIE)]
    return SearchResult(tuple(found), min(equal, key=simplicity))


def _seconds(candidate: Candidate) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.seconds.value


def _impossible(found: Sequence[Candidate], machine: Machine, request: Request) -> Diagnostic:
    """Why nothing is left: too little memory if that stopped any, else why the simplest is none."""
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
