"""From a step to the selected plan: enumerate candidates, compile them all, keep what fits, take the fastest.

Predictions that differ by less than they can be trusted count as equal, and the simplest of equals wins: plans must not
flicker between runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes import log
from moaic.passes.build import Plan, build
from moaic.passes.candidates import candidates, relaxed, simplicity
from moaic.passes.config import Config, Request
from moaic.passes.cost import Prediction
from moaic.passes.machine import Machine
from moaic.passes.memory import Memory
from moaic.passes.pool import Compiled, Here, Pool
from moaic.passes.solver_prices import prices_of

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
    crashed: bool = False
    """Dropped for a bug of ours."""

    @property
    def fate(self) -> str:
        return self.dropped or "possible"

    @property
    def too_large(self) -> bool:
        """Whether it is memory that stands in the way."""
        return bool(self.dropped) and self.memory is not None


@dataclass(frozen=True, slots=True)
class Fates:
    """Every candidate of a step, and which of them was selected."""

    candidates: tuple[Candidate, ...]
    selected: Config

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
    fates: Fates
    machine: Machine


def search(step: Module, machine: Machine, request: Request, *, pool: Pool) -> Selection:
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
    workshop.begin(step, machine)
    fates = _select(_cost(_compile(configs, workshop, machine, wanted), workshop))
    return finish(step, machine, fates)


def finish(step: Module, machine: Machine, fates: Fates) -> Selection:
    """The plan of a selection that was made before, said in the log."""
    chosen = fates.of(fates.selected)
    assert chosen.memory is not None
    assert chosen.prediction is not None
    plan = build(step, chosen.config, prices_of(machine))
    log.selected(step, chosen.config, chosen.memory, chosen.prediction)
    if chosen.memory.split > machine.memory:
        log.split_does_not_fit(chosen.memory, machine.memory)
    return Selection(plan, fates, machine)


def _compile(configs: Sequence[Config], pool: Pool, machine: Machine, request: Request) -> list[Candidate]:
    """Every candidate with its memory or the reason why it is dropped."""
    log.compiling()
    start = time.perf_counter()
    known = set(configs)
    twins = {config: twin for config in configs if (twin := _keeping_more(config, known)) is not None}
    found = _fates([config for config in configs if config not in twins], pool, machine)
    needed = [config for config, twin in twins.items() if found[twin].too_large]
    found |= _fates(needed, pool, machine)
    for config, twin in twins.items():
        found.setdefault(config, Candidate(config, dropped=found[twin].dropped or NOT_NEEDED))
    fates = [found[config] for config in configs]
    log.compiled(time.perf_counter() - start, sum(not fate.dropped for fate in fates))
    for fate in fates:
        if fate.dropped:
            log.dropped(fate.config, fate.dropped)
    if all(fate.dropped for fate in fates):
        raise _impossible(fates, machine, request)
    return fates


def _keeping_more(config: Config, known: Collection[Config]) -> Config | None:
    """The known plan that splits and recomputes least and is otherwise the same, if that is another one.

    It is faster, so `config` is worth a look only where that one is too large. A pipeline needs its micro-batches.
    """
    least = config.micro_batches if config.pp > 1 else 1
    twins = [replace(config, recompute="saved", micro_batches=parts) for parts in (least, config.micro_batches)]
    return next((twin for twin in twins if twin in known and twin != config), None)


def _fates(configs: Sequence[Config], pool: Pool, machine: Machine) -> dict[Config, Candidate]:
    made = dict(zip(configs, pool.compile(configs), strict=True))
    crashes: dict[str, list[Config]] = {}
    for config, result in made.items():
        if result.crash:
            crashes.setdefault(result.crash, []).append(config)
    for trace, those in crashes.items():
        log.crashed(those, trace)
    return {config: _fate(config, result, machine) for config, result in made.items()}


def _fate(config: Config, result: Compiled, machine: Machine) -> Candidate:
    if result.crash:
        return Candidate(config, dropped=result.crash.strip().rpartition("\n")[2], crashed=True)
    if result.memory is not None and result.memory.peak > machine.memory:
        reason = f"needs {_mib(result.memory.peak)} per worker, and there are {_mib(machine.memory)}"
        return Candidate(config, result.memory, dropped=reason)
    return Candidate(config, result.memory, dropped=result.dropped)


def _cost(found: Sequence[Candidate], pool: Pool) -> list[Candidate]:
    """The possible candidates with their predictions, the others as they are."""
    log.selecting()
    start = time.perf_counter()
    possible = [candidate.config for candidate in found if not candidate.dropped]
    predictions = dict(zip(possible, pool.cost(possible), strict=True))
    log.costed(time.perf_counter() - start)
    return [replace(candidate, prediction=predictions.get(candidate.config)) for candidate in found]


def _select(found: Sequence[Candidate]) -> Fates:
    possible = [candidate for candidate in found if candidate.prediction is not None]
    best = min(map(_seconds, possible))
    equal = [candidate.config for candidate in possible if _seconds(candidate) <= best * (1 + TIE)]
    return Fates(tuple(found), min(equal, key=simplicity))


def _seconds(candidate: Candidate) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.seconds.value


def _impossible(found: Sequence[Candidate], machine: Machine, request: Request) -> Diagnostic:
    """Why nothing is left: too little memory if that stopped any, else why the simplest is none."""
    sized = [(candidate.memory.peak, candidate.config) for candidate in found if candidate.memory is not None]
    if sized:
        least, config = min(sized)
        return NoPlanFits(
            f"no plan fits: the smallest of {len(found)}, {config}, needs {_mib(least)} per worker, and there are "
            f"{_mib(machine.memory)}",
            found,
            request,
        )
    reasons = list(dict.fromkeys(candidate.dropped for candidate in found))
    context = "\n".join(f"  {reason}" for reason in reasons[1:])
    return Diagnostic(reasons[0], context=f"other plans are not possible either:\n{context}" if context else "")


def _mib(size: int) -> str:
    return f"{size / log.MIB:.0f} MiB"
