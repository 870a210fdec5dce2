"""Evaluation of candidates: in the order of their lower bounds, without those that cannot be selected.

Bounds come from the step on one device, from plans that do no more work (`lower_bound`), and from candidates that have
been compiled. A candidate is left out where it would not fit, where it is slower than another, where it is neither
faster than the best nor simpler than another that is as fast, and where it would save memory that is not short. The
more have been looked into, the more another has to promise, so that no search is endless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from moaic.ir.graph import Module
from moaic.passes.config import GATHERING, Config, simplicity
from moaic.passes.estimate.lower_bound import (
    Alone,
    Bounds,
    Parameters,
    Work,
    alone,
    coarsest,
    fewer_bytes,
    flat,
    in_turn,
    least,
    parts,
    replicated,
    sharded_bytes,
    sharded_otherwise,
    unstaged,
    work_of,
)
from moaic.passes.estimate.stages import StageBound
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf.machine import Machine
from moaic.planner.candidates import CandidateSpace
from moaic.planner.memory_fit import frugal
from moaic.planner.outcome import TIE, Candidate, compiled_candidate, per_worker, simplest_of_equals
from moaic.planner.relatives import Relatives
from moaic.planner.worker import Compiled, CompilerPool

NOT_NEEDED = "it would save memory that is not short"

RUNNERS_UP = 2
"""Possible plans beside the selected one that users want to see, wherever there are as many."""

MANY = 4096
"""Candidates beyond which plans that split the sequence come last, and only if they may be faster by CLEARLY.

They are most of the candidates, and need the most time to be priced.
"""

CLEARLY = 0.05
"""Relative difference that exceeds what predictions of plans of one step err by."""

LEAST_COMPILED = 0.8
"""Share of what compiling the step for one device takes that compiling any plan of it takes at least."""

AS_ALONE = 0.95
"""The relative speed of unequal workers in a plan is that of the whole step on one of each, but for this part."""

ENOUGH = 64
"""Prices and bounds of plans after which a plan has to promise more and more to be looked into."""

MORE = 0.005
"""Relative difference by which it has to promise to be faster, for each price and bound beyond."""

IN_A_ROW = 8
"""Bounds after which pipelines are priced whose bounds are known, even if others might be faster yet."""

MESHES = 2
"""Fewest meshes that are looked into at once, where so many are unknown: each keeps a process busy."""

ROUND = 4
"""Most candidates that are compiled before others are left out because of them."""


@dataclass(slots=True)
class _Waiting:
    """A candidate without an outcome, and lower bounds of its seconds and bytes."""

    config: Config
    seconds: float
    nbytes: int = 0
    orders: Sequence[Config] = ()
    """Where all candidates on a mesh wait as one, the simplest: the mesh with each number of parts and schedule."""
    others: int = 0
    """How many candidates wait beside it then."""
    stages: StageBound | None = None
    """What its stages take at least, once that was asked; nothing where the step has no equal layers."""

    @property
    def is_deep(self) -> bool:
        return self.stages is not None and self.stages.seconds > 0

    @property
    def is_whole(self) -> bool:
        return bool(self.orders)


class Evaluation:
    """The outcome of every candidate of a step on a machine."""

    def __init__(self, step: Module, space: CandidateSpace, pool: CompilerPool, machine: Machine, steps: int) -> None:
        self.step = step
        self.steps = steps
        self.space = space
        self.pool = pool
        self.machine = machine
        self.relatives = Relatives(space.facts.speeds)
        self.found: dict[Config, Candidate] = {}
        self.too_large: set[Config] = set()
        self.impossible: dict[Config, str] = {}
        """Meshes (`least`) on which there is no plan, and why."""
        self.no_better: list[_Waiting] = []
        """Left out because they are neither faster than the best plan nor simpler than one that is as fast."""
        self.slower: list[_Waiting] = []
        """Left out because another plan is faster."""
        self.best = math.inf
        """Price of the best plan so far, in seconds."""
        self.simplest: Config | None = None
        """The plan that would be selected now."""
        self.looked_into = 0
        """Prices and bounds so far: they take about as long each, and their number is the same in every run."""
        self.looked_into_before = 0
        """Prices and bounds before the last candidates were priced."""
        self.compiling = self.costing = 0.0
        """Seconds spent on compiling and on costing."""
        self.bounds = self._bounds() if space.total > 1 else Bounds({}, machine)
        compiling = min((each.compiling for each in self.bounds.by_config.values()), default=0.0)
        self.least_compiling = LEAST_COMPILED * compiling / steps
        """Seconds of a price that are for compiling, at least."""
        if machine.made or space.total == 1:
            pool.begin(step, machine)
        self.splits_last = space.total > MANY and any(mesh.cp == 1 for mesh in space.meshes)
        """Whether plans that split the sequence wait until all others have their outcome."""
        whole = [self._whole(mesh) for mesh in space.meshes]
        self.waiting = [each for each in whole if not self._comes_last(each)]
        self.last = [each for each in whole if self._comes_last(each)]

    def run(self) -> list[Candidate]:
        """Every candidate with its outcome; those on a mesh that was dropped as a whole are told by the simplest."""
        self._settle()
        self.waiting, self.last = self.last, []
        self._settle()
        if self.best == math.inf:
            self._evaluate(self._smallest())
        else:
            self._evaluate(self._runners_up())
            self._settle()
        return sorted(self.found.values(), key=lambda each: simplicity(each.config))

    @property
    def promising(self) -> list[float]:
        """By candidate that was left out although it may be faster than the best plan, by how much at most."""
        return [
            self.best / self._price(each) - 1
            for each in self.slower
            for _ in range(1 + each.others)
            if self._price(each) * (1 + TIE) < self.best
        ]

    def _settle(self) -> None:
        """Finds the outcome of every candidate that waits."""
        while self.waiting or self._reconsider():
            self._leave_out()
            promising = self._promising()
            if unknown := self._unknown_meshes(promising):
                self._bound(unknown)
            elif whole := [each for each in promising if each.is_whole]:
                self._open(whole)
            elif staged := self._unknown_stages(promising):
                self._bound_by_stages(staged)
            elif unknown := self._unknown_plans(promising):
                self._bound(unknown)
            else:
                self._evaluate([each.config for each in promising])

    def _runners_up(self) -> list[Config]:
        """Where fewer are possible than users want to see: those left out that may take least.

        No pipelines of more stages than the selected plan has, whose prices take long.
        """
        assert self.simplest is not None
        missing = max(0, 1 + RUNNERS_UP - sum(each.prediction is not None for each in self.found.values()))
        others = (each for each in (*self.no_better, *self.slower) if each.config.pp <= self.simplest.pp)
        self._wait_again(sorted(others, key=lambda each: each.seconds)[:missing])
        self._open([each for each in self.waiting if each.is_whole])
        fitting = [each for each in self.waiting if each.nbytes <= self.machine.most_memory]
        return [each.config for each in sorted(fitting, key=lambda each: each.seconds)[:missing]]

    def _whole(self, mesh: Config) -> _Waiting:
        """All candidates on a mesh as one."""
        orders = [*self.space.in_parts(mesh)]
        return _Waiting(
            self.space.simplest(mesh), self.bounds.of_mesh(orders), orders=orders, others=self.space.count(mesh) - 1
        )

    def _open(self, meshes: Sequence[_Waiting]) -> None:
        """All candidates on these meshes wait, each on its own."""
        configs = [config for each in meshes for config in self.space.on(each.config.mesh)]
        self.relatives.add(configs)
        self.waiting = [each for each in self.waiting if each not in meshes]
        self.waiting += [
            _Waiting(config, seconds, self.bounds.nbytes(config))
            for config, seconds in zip(configs, self.bounds.all_seconds(configs), strict=True)
        ]

    def _bounds(self) -> Bounds:
        """Lower bounds from the step on one device, with assumed kernels: compiled ones are no faster."""
        self.pool.begin(self.step, replace(self.machine, made={}))
        on_one = sorted(set(map(alone, self.space.on(self.space.meshes[0]))), key=simplicity)
        memories = {config: made.memory for config, made in self._compiled(on_one).items() if made.memory is not None}
        costs = self._costs(list(memories))
        on_one_device = {
            config: Alone(
                costs[config].seconds.value,
                memory,
                costs[config].of("optimizer"),
                costs[config].compiling,
                costs[config].of("launch"),
            )
            for config, memory in memories.items()
        }
        if (speeds := self.space.facts.speeds) is None:
            return Bounds(on_one_device, self.machine)
        return Bounds(on_one_device, self.machine, fastest=lambda mesh: speeds.fastest(mesh) / AS_ALONE)

    def _leave_out(self) -> None:
        """Drops every candidate that need not be compiled, with the reason."""
        kept: list[_Waiting] = []
        for each in self.waiting:
            if each.nbytes > self.machine.most_memory:
                self.too_large.add(each.config)
                self._drop(each, f"needs at least {per_worker(each.nbytes, self.machine.most_memory)}")
            elif self.impossible and (reason := self.impossible.get(least(each.config))):
                self._drop(each, reason)
            elif self._is_slower(each):
                self.slower.append(each)
                self._drop(each, self._why_slower(each))
            elif self._is_no_better(each):
                self.no_better.append(each)
                self._drop(each, f"takes at least {_ms(each.seconds)}, and a simpler plan takes about as long")
            else:
                kept.append(each)
        # A faster relative may stand behind the candidate, and be dropped in the same round.
        self.waiting = [each for each in kept if not self._is_needless(each)]

    def _is_needless(self, each: _Waiting) -> bool:
        """Whether a candidate would only save memory that is not short; drops it then."""
        if each.is_whole or (enough := self._enough(each.config)) is None:
            return False
        self._drop(each, enough.dropped or NOT_NEEDED)
        return True

    def _comes_last(self, each: _Waiting) -> bool:
        return self.splits_last and each.config.cp > 1

    def _is_slower(self, each: _Waiting) -> bool:
        """Whether a candidate is slower than the best plan, or does not promise to be as much faster as it has to."""
        most = self.best * (1 + TIE)
        if self._comes_last(each):
            most = min(most, self._faster_by(CLEARLY))
        if self.looked_into > ENOUGH:
            most = min(most, self._faster_by(MORE * (self.looked_into - ENOUGH)))
        return self._price(each) > most

    def _faster_by(self, difference: float) -> float:
        """The price of a plan whose step is faster than the best by this relative difference."""
        return self.least_compiling + (self.best - self.least_compiling) / (1 + difference)

    def _price(self, each: _Waiting) -> float:
        """Lower bound on the price of a candidate."""
        return each.seconds + self.least_compiling

    def _why_slower(self, each: _Waiting) -> str:
        least = f"takes at least {_ms(each.seconds)}"
        best = f"another plan takes {_ms(self.best - self.least_compiling)}"
        if self._price(each) > self.best * (1 + TIE):
            return f"{least}, and {best}"
        return f"{least}, but {best}, and {self.looked_into} plans had been looked into"

    def _drop(self, each: _Waiting, reason: str) -> None:
        self.found[each.config] = Candidate(each.config, dropped=reason, others=each.others)

    def _enough(self, config: Config) -> Candidate | None:
        """A faster relative that need not save memory, or is not possible either."""
        known = (self.found[each] for each in self.relatives.faster(config) if each in self.found)
        return next((each for each in known if each.config not in self.too_large), None)

    def _is_no_better(self, each: _Waiting) -> bool:
        """Whether the plan that would be selected now is simpler, and would be its equal if it were the best.

        It would not be selected then, and what it leaves of the equals would still have that plan as the simplest.
        """
        if self.simplest is None or simplicity(each.config) < simplicity(self.simplest):
            return False
        return self._price(each) * (1 + TIE) >= self.found[self.simplest].price(self.steps)

    def _reconsider(self) -> bool:
        """Whether candidates wait again that were no better than a plan which would not be selected any more."""
        self._wait_again(
            [each for each in self.no_better if not self._is_slower(each) and not self._is_no_better(each)]
        )
        return bool(self.waiting)

    def _wait_again(self, dropped: Sequence[_Waiting]) -> None:
        for each in dropped:
            del self.found[each.config]
        if dropped:
            self.no_better = [each for each in self.no_better if each not in dropped]
            self.slower = [each for each in self.slower if each not in dropped]
        self.waiting += dropped

    def _promising(self) -> list[_Waiting]:
        """The candidates to compile next, which wait for no other outcome: those with the least bounds.

        First those without stages that are known to be faster than the best plan, as a better one leaves out more.
        """
        ready = [
            each
            for each in self.waiting
            if each.is_whole or all(faster in self.found for faster in self.relatives.faster(each.config))
        ]
        if self.best == math.inf:
            ready = [each for each in ready if each.config.pp == 1] or ready
            lowest = min((each.seconds for each in ready), default=0.0)
            ready = [each for each in ready if each.seconds <= lowest * (1 + TIE)]
        elif known := [each for each in ready if self._is_cheap(each) and self._price(each) * (1 + TIE) < self.best]:
            ready = known
        elif self.looked_into - self.looked_into_before >= IN_A_ROW:
            ready = [each for each in ready if each.stages is not None and not self._is_slower(each)] or ready
        ready.sort(key=lambda each: (each.seconds, parts(each.config)))
        return _one_of_each_sharding(ready)[:ROUND]

    def _is_cheap(self, each: _Waiting) -> bool:
        """Whether a candidate is priced soon: it has no stages, and its mesh is known."""
        return each.config.pp == 1 and self._least(each.config) in self.bounds.simpler

    def _least(self, config: Config) -> Config:
        """The plan that bounds all on the mesh of `config`: with dp in place of stages if the rows suffice."""
        in_place = flat(config.mesh)
        is_bound = not self.machine.kinds and self.space.facts.rows % in_place.dp == 0
        return in_place if is_bound else least(config)

    def _unknown_meshes(self, promising: Sequence[_Waiting]) -> list[Config]:
        """The plans that bound all on the meshes of these and are not known yet.

        First those that bound the most, with the next of them where there are few; then those that only bound the mesh
        of a candidate, where these are impossible.
        """
        if self.best == math.inf:
            return []
        known = self.bounds.simpler.keys()
        if wanted := dict.fromkeys(self._least(each.config) for each in promising).keys() - known:
            by_bound = sorted(self.waiting, key=lambda each: each.seconds)
            others = dict.fromkeys(self._least(each.config) for each in by_bound)
            return _coarsest_first(wanted, [mesh for mesh in others if mesh not in known])
        # With dp in place of stages the work is the same, unless there is no such plan.
        whole = dict.fromkeys(
            least(each.config) for each in promising if each.is_whole and self._least(each.config) in self.impossible
        )
        return [mesh for mesh in whole if mesh not in known]

    def _unknown_stages(self, promising: Sequence[_Waiting]) -> list[_Waiting]:
        """The pipelines among these of which no stages are known, and all others whose stages do the same work."""
        if self.best == math.inf:
            return []
        works = {unstaged(each.config) for each in promising if each.config.pp > 1 and each.stages is None}
        return [
            each
            for each in self.waiting
            if each.config.pp > 1 and not each.is_whole and each.stages is None and unstaged(each.config) in works
        ]

    def _bound_by_stages(self, pipelines: Sequence[_Waiting]) -> None:
        """Better bounds for these pipelines."""
        self.looked_into += len({unstaged(each.config) for each in pipelines})
        for each, found in zip(pipelines, self.pool.stage_bounds([each.config for each in pipelines]), strict=True):
            each.stages = found
            each.seconds, each.nbytes = max(each.seconds, found.seconds), max(each.nbytes, found.nbytes)

    def _unknown_plans(self, promising: Sequence[_Waiting]) -> list[Config]:
        """The plans that bound these candidates and are not known yet."""
        if self.best == math.inf:
            return []
        works = [unstaged(each.config) for each in promising if not each.is_deep]
        gathering = [each.config for each in promising if each.config.pp > 1 and each.config.distribute_param == "use"]
        plans = dict.fromkeys([*works, *map(in_turn, gathering)])
        return [plan for plan in plans if plan not in self.bounds.simpler]

    def _bound(self, plans: Sequence[Config]) -> None:
        """Better bounds for all candidates that do the work of one of these plans."""
        self.looked_into += len(plans)
        gathers = {plan for plan in plans if plan.distribute_param == "use"}
        levels = {plan: [plan] if plan in gathers else self.space.cheapest_levels(plan) for plan in plans}
        made = self._compiled([each for configs in levels.values() for each in configs])
        sized = {config: result.memory for config, result in made.items() if result.memory is not None}
        costs, gradients = self._costs([*sized]), len(self.step.main.gradients)
        known = dict.fromkeys(plans, Work(0.0, Parameters()))
        for plan, configs in levels.items():
            works = [work_of(each, costs[each], sized[each], gradients) for each in configs if each in sized]
            if works:
                memory = next((work.memory_replicated for work in works if work.memory_replicated is not None), None)
                known[plan] = replace(min(works, key=lambda work: work.seconds), memory_replicated=memory)
            elif plan == least(plan) and (reason := made[configs[0]].dropped):
                self.impossible[plan] = reason
        self.bounds = replace(self.bounds, simpler={**self.bounds.simpler, **known})
        seconds = self.bounds.all_seconds(each.config for each in self.waiting)
        for each, of_one in zip(self.waiting, seconds, strict=True):
            each.seconds = max(each.seconds, self.bounds.of_mesh(each.orders) if each.is_whole else of_one)
            if not each.is_whole:
                each.nbytes = max(each.nbytes, self.bounds.nbytes(each.config))
            if each.stages is not None and each.config.distribute_param == "use":
                each.seconds = max(each.seconds, self.bounds.gathering(each.config, each.stages.seconds))

    def _smallest(self) -> list[Config]:
        """If nothing fits: dropped candidates that may need less than every compiled one, for the message."""
        sized = (each.memory.peak for each in self.found.values() if each.memory is not None)
        lowest = min(sized, default=math.inf)
        left_out = [config for config in self.found if config in self.too_large and self.found[config].memory is None]
        return frugal(config for config in left_out if self.bounds.nbytes(config) < lowest)

    def _evaluate(self, configs: Sequence[Config]) -> None:
        """Compiles these candidates and predicts those that fit."""
        self.looked_into += len(configs)
        self.looked_into_before = self.looked_into
        made = {config: compiled_candidate(config, result) for config, result in self._compiled(configs).items()}
        costs = self._costs([config for config, candidate in made.items() if not candidate.dropped])
        self.found.update((config, replace(each, prediction=costs.get(config))) for config, each in made.items())
        self.too_large.update(config for config, each in made.items() if each.dropped and each.memory is not None)
        self.best = min([self.best, *(cost.price(self.steps) for cost in costs.values())])
        self.simplest = simplest_of_equals(self.found.values(), self.steps)
        larger = {later: config for config in made for later in self.relatives.with_more_parts(config)}
        alike = {replicated(config): cost for config, cost in costs.items() if config.distribute_param not in GATHERING}
        sized = {replicated(config): (config, each.memory) for config, each in made.items() if each.memory is not None}
        self.waiting = [each for each in self.waiting if each.config not in self.found]
        for each in self.waiting:
            memory = made[larger[each.config]].memory if each.config in larger else None
            if memory is not None:
                more = each.config.micro_batches / larger[each.config].micro_batches
                each.nbytes = max(each.nbytes, fewer_bytes(memory, more))
            if each.is_whole:
                continue
            if (otherwise := sized.get(replicated(each.config))) is not None:
                each.nbytes = max(each.nbytes, sharded_bytes(*otherwise, each.config))
            if (prediction := alike.get(replicated(each.config))) is not None:
                each.seconds = max(each.seconds, sharded_otherwise(prediction, self.machine))

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


def _coarsest_first(wanted: Collection[Config], unknown: Sequence[Config]) -> list[Config]:
    """The coarsest meshes that bound the wanted ones, and if they are fewer than MESHES those that would be next.

    `unknown` has the meshes to choose from, those that promise most first.
    """
    found = {coarsest(mesh, unknown) for mesh in wanted}
    while len(found) < MESHES and (others := [mesh for mesh in unknown if mesh not in found]):
        found.add(coarsest(others[0], others))
    return sorted(found, key=simplicity)


def _one_of_each_sharding(ready: Sequence[_Waiting]) -> list[_Waiting]:
    """The first of those pipelines that differ only in how parameters are sharded: its price may bound the others."""
    first: dict[Config, _Waiting] = {}
    for each in ready:
        first.setdefault(each.config if each.config.pp == 1 else replicated(each.config), each)
    return [*first.values()]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
