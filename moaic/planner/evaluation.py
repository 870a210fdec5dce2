"""Evaluation of candidates: in the order of their lower bounds, without those that cannot be selected.

Bounds come from the step on one device, from plans that do no more work (`lower_bound`), and from candidates that have
been compiled. A candidate is left out where it would not fit, where it is slower than another, where it is neither
faster than the best nor simpler than another that is as fast, and where it would save memory that is not short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from moaic.ir.graph import Module
from moaic.passes.config import Config, simplicity
from moaic.passes.estimate.lower_bound import Alone, Bounds, alone, fewer_bytes, least, unstaged
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf.machine import Machine
from moaic.planner.memory_fit import frugal
from moaic.planner.outcome import TIE, Candidate, compiled_candidate, per_worker, simplest_of_equals
from moaic.planner.worker import Compiled, CompilerPool

NOT_NEEDED = "it would save memory that is not short"

ROUND = 16
"""Most candidates that are compiled before others are left out because of them."""


@dataclass(slots=True)
class _Waiting:
    """A candidate without an outcome, and lower bounds of its seconds and bytes."""

    config: Config
    seconds: float
    nbytes: int


class Evaluation:
    """The outcome of every candidate of a step on a machine."""

    def __init__(
        self, step: Module, configs: Sequence[Config], pool: CompilerPool, machine: Machine, steps: int
    ) -> None:
        self.step = step
        self.steps = steps
        self.configs = configs
        self.pool = pool
        self.machine = machine
        self.relatives = _Relatives(configs)
        self.found: dict[Config, Candidate] = {}
        self.too_large: set[Config] = set()
        self.no_better: list[_Waiting] = []
        """Left out because they are neither faster than the best plan nor simpler than one that is as fast."""
        self.best = math.inf
        """Price of the best plan so far, in seconds."""
        self.simplest: Config | None = None
        """The plan that would be selected now."""
        self.compiling = self.costing = 0.0
        """Seconds spent on compiling and on costing."""
        self.bounds = self._bounds() if len(configs) > 1 else Bounds({})
        if machine.made or len(configs) == 1:
            pool.begin(step, machine)
        self.waiting = [_Waiting(each, self.bounds.seconds(each), self.bounds.nbytes(each)) for each in configs]

    def run(self) -> list[Candidate]:
        """Every candidate with its outcome."""
        while self.waiting or self._reconsider():
            self._leave_out()
            promising = self._promising()
            if unknown := self._unknown(promising):
                self._bound(unknown)
            else:
                self._evaluate([each.config for each in promising])
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

    def _leave_out(self) -> None:
        """Drops every candidate that need not be compiled, with the reason."""
        rank = None if self.simplest is None else simplicity(self.simplest)
        kept: list[_Waiting] = []
        for each in self.waiting:
            if each.nbytes > self.machine.memory:
                self.too_large.add(each.config)
                self._drop(each, f"needs at least {per_worker(each.nbytes, self.machine)}")
            elif each.seconds > self.best * (1 + TIE):
                self._drop(each, f"takes at least {_ms(each.seconds)}, and another plan takes {_ms(self.best)}")
            elif each.seconds > self.best and rank is not None and simplicity(each.config) > rank:
                self.no_better.append(each)
                self._drop(each, f"takes at least {_ms(each.seconds)}, and a simpler plan takes about as long")
            elif (enough := self._enough(each.config)) is not None:
                self._drop(each, enough.dropped or NOT_NEEDED)
            else:
                kept.append(each)
        self.waiting = kept

    def _drop(self, each: _Waiting, reason: str) -> None:
        self.found[each.config] = Candidate(each.config, dropped=reason)

    def _enough(self, config: Config) -> Candidate | None:
        """A faster relative that need not save memory, or is not possible either."""
        known = (self.found[each] for each in self.relatives.faster(config) if each in self.found)
        return next((each for each in known if each.config not in self.too_large), None)

    def _reconsider(self) -> bool:
        """Whether candidates wait again that were no better than a plan which would not be selected any more."""
        rank = None if self.simplest is None else simplicity(self.simplest)
        again = [
            each
            for each in self.no_better
            if each.seconds <= self.best * (1 + TIE) and (rank is None or simplicity(each.config) < rank)
        ]
        for each in again:
            del self.found[each.config]
        self.no_better = [each for each in self.no_better if each not in again] if again else self.no_better
        self.waiting = again
        return bool(again)

    def _promising(self) -> list[_Waiting]:
        """The candidates to compile next, which wait for no other outcome: those with the least bounds."""
        ready = [
            each for each in self.waiting if all(faster in self.found for faster in self.relatives.faster(each.config))
        ]
        if self.best == math.inf:
            ready = [each for each in ready if each.config.pp == 1] or ready
            lowest = min((each.seconds for each in ready), default=0.0)
            ready = [each for each in ready if each.seconds <= lowest * (1 + TIE)]
        return sorted(ready, key=lambda each: each.seconds)[:ROUND]

    def _unknown(self, promising: Iterable[_Waiting]) -> list[Config]:
        """The plans that bound these candidates and are not known yet: first those that bound the most."""
        if self.best == math.inf:
            return []
        for simpler in (least, unstaged):
            plans = dict.fromkeys(simpler(each.config) for each in promising)
            if found := [config for config in plans if config not in self.bounds.simpler]:
                return found
        return []

    def _bound(self, plans: Sequence[Config]) -> None:
        """Better bounds for all candidates that do the work of one of these plans."""
        sized = [config for config, made in self._compiled(plans).items() if made.memory is not None]
        costs = self._costs(sized)
        known = {config: costs[config].seconds.value if config in costs else 0.0 for config in plans}
        self.bounds = replace(self.bounds, simpler={**self.bounds.simpler, **known})
        for each in self.waiting:
            each.seconds = self.bounds.seconds(each.config)

    def _smallest(self) -> list[Config]:
        """If nothing fits: dropped candidates that may need less than every compiled one, for the message."""
        sized = (each.memory.peak for each in self.found.values() if each.memory is not None)
        lowest = min(sized, default=math.inf)
        left_out = [config for config in self.configs if config in self.too_large and self.found[config].memory is None]
        return frugal(config for config in left_out if self.bounds.nbytes(config) < lowest)

    def _evaluate(self, configs: Sequence[Config]) -> None:
        """Compiles these candidates and predicts those that fit."""
        made = {
            config: compiled_candidate(config, result, self.machine)
            for config, result in self._compiled(configs).items()
        }
        costs = self._costs([config for config, candidate in made.items() if not candidate.dropped])
        self.found.update((config, replace(each, prediction=costs.get(config))) for config, each in made.items())
        self.too_large.update(config for config, each in made.items() if each.dropped and each.memory is not None)
        self.best = min([self.best, *(cost.price(self.steps) for cost in costs.values())])
        self.simplest = simplest_of_equals(self.found.values(), self.steps)
        larger = {later: config for config in made for later in self.relatives.with_more_parts(config)}
        self.waiting = [each for each in self.waiting if each.config not in self.found]
        for each in self.waiting:
            memory = made[larger[each.config]].memory if each.config in larger else None
            if memory is not None:
                more = each.config.micro_batches / larger[each.config].micro_batches
                each.nbytes = max(each.nbytes, fewer_bytes(memory, more))

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


class _Relatives:
    """Candidates that differ in one decision."""

    def __init__(self, configs: Sequence[Config]) -> None:
        self.known = set(configs)
        self.values = {
            name: sorted({getattr(config, name) for config in configs}) for name in ("micro_batches", "loss_chunks")
        }
        self._faster: dict[Config, list[Config]] = {}

    def faster(self, config: Config) -> list[Config]:
        """The faster relatives: saved activations, gathered keys, fewer micro-batches or chunks.

        A candidate is worth compiling only if all of these are too large. A pipeline keeps its micro-batches.
        """
        if config not in self._faster:
            others = [replace(config, recompute="saved"), replace(config, gather_keys=True)]
            found = [each for each in others if each != config and each in self.known]
            parts = self._next(config, "micro_batches") if config.pp == 1 else None
            more = (parts, self._next(config, "loss_chunks"))
            self._faster[config] = [*found, *(each for each in more if each is not None)]
        return self._faster[config]

    def with_more_parts(self, config: Config) -> Iterator[Config]:
        """The relatives with more micro-batches."""
        more = (replace(config, micro_batches=n) for n in self.values["micro_batches"] if n > config.micro_batches)
        return (each for each in more if each in self.known)

    def _next(self, config: Config, name: str) -> Config | None:
        """The relative with the next smaller value of `name`."""
        fewer = (value for value in reversed(self.values[name]) if value < getattr(config, name))
        return next((each for value in fewer if (each := replace(config, **{name: value})) in self.known), None)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
