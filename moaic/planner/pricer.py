"""Prices of candidates: of a deep step from sketches of few of its layers, of any other from the whole of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.estimate.lower_bound import unstaged
from moaic.passes.estimate.memory import Memory, fused_functions
from moaic.passes.estimate.stages import StageBound, bound_of_stages
from moaic.passes.estimate.step_time import Prediction, Rates, function_seconds
from moaic.passes.estimate.structural import UNITS, Deeper, Sketch, extrapolated, sketch
from moaic.passes.perf.machine import Machine
from moaic.passes.pipeline.shares import Share
from moaic.passes.schedules import schedule_of
from moaic.passes.sharding.of_padded import OfPadded
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.passes.stage_shares import shares_of_stages
from moaic.passes.transforms.shallow import Stack, shallow

WORTH = 1.5
"""A step is priced from sketches if it has as many times the units of all of these; a pipeline, if it has more."""


class Pricer:
    """Prices candidates of one step on one machine."""

    def __init__(self, step: Module, machine: Machine, worth: float = WORTH) -> None:
        self._machine = machine
        self._builder = Builder(step, coefficients_of(machine))
        self._fused = fused_functions()
        self._rates = [Rates(each, function_seconds(each, self._fused)) for each in machine.by_kind]
        self._worth = worth
        self._sketches = self._sketched([[stack] for stack in self._builder.stacks], worth)
        self._of_whole = self._builder.unverified()
        self._in_stages: dict[tuple[int, ...], _Sketches | None] = {}
        self._trains = bool(step.main.gradients)
        self._replicated: dict[Config, tuple[Sketch, list[Deeper]]] = {}
        self._shares: dict[tuple[int, ...], list[Share]] = {}
        self._of_padded = OfPadded(step, lambda padded: Pricer(padded, machine, worth))

    def price(self, config: Config) -> tuple[Memory, Prediction]:
        """Memory and time of the plan for `config`; raises Diagnostic with the reason where there is none."""
        if (other := self._of_padded.instead(config)) is not None:
            return other.price(config)
        found = self._from_sketches(config) if config.pp == 1 else self._from_staged(config)
        return found or self._whole(config)

    def _whole(self, config: Config) -> tuple[Memory, Prediction]:
        found = extrapolated(self._priced(self._of_whole.partitioned(config), config), [])
        assert found is not None, "a whole step has all instructions of itself"
        return found

    def _from_staged(self, config: Config) -> tuple[Memory, Prediction] | None:
        """The price of a pipeline from sketches with fewer units in each stage; None where it has no such."""
        base, *deeper = [Deeper(self._priced(module, config), lacking) for module, lacking in self.staged(config)]
        return extrapolated(base.sketch, deeper)

    def staged(self, config: Config) -> list[tuple[Module, int]]:
        """The modules of a pipeline from which its price follows, each with the units that the base lacks.

        Raises Diagnostic with the reason where there is no such plan.
        """
        found = self._staged(_shares_in(config))
        return [(self._of_whole.partitioned(config), 0)] if found is None else found.partitioned(config)

    def _from_sketches(self, config: Config) -> tuple[Memory, Prediction] | None:
        found = self._sketches_of(config)
        return None if found is None else extrapolated(*found)

    def stage_bound(self, config: Config) -> StageBound:
        """What the pipeline of `config` takes at least.

        Nothing where the step is not deep or has no gradients, and for a single micro-batch.
        """
        if not self._trains or config.micro_batches == 1:
            return StageBound()
        try:
            if (other := self._of_padded.instead(config)) is not None:
                return other.stage_bound(config)
            found = self._sketches_of(unstaged(config))
            if found is None:
                return StageBound()
            schedule = schedule_of(config.schedule, config.pp, config.micro_batches)
            stages = self._shares_of(_shares_in(config))
        except Diagnostic:
            return StageBound()
        return bound_of_stages(config, schedule, stages, *found)

    def _shares_of(self, wanted: tuple[int, ...]) -> list[Share]:
        """What each of the stages has of the stacks that have deeper sketches."""
        assert self._sketches is not None
        if wanted not in self._shares:
            self._shares[wanted] = self._builder.shares([stack for (stack,) in self._sketches.deep], wanted)
        return self._shares[wanted]

    def _sketches_of(self, config: Config) -> tuple[Sketch, list[Deeper]] | None:
        """The sketches of a plan, the base and the deeper ones; kept for bounds where no parameters are sharded."""
        if config in self._replicated:
            return self._replicated[config]
        if self._sketches is None:
            return None
        base, *deeper = [Deeper(self._priced(module, config), lacking) for module, lacking in self.sketched(config)]
        found = base.sketch, deeper
        if config.distribute_param == "none":
            self._replicated[config] = found
        return found

    def sketched(self, config: Config) -> list[tuple[Module, int]]:
        """The modules of a plan of a deep step from which its price follows, each with the units the base lacks."""
        assert self._sketches is not None
        return self._sketches.partitioned(config)

    def _staged(self, shares: tuple[int, ...]) -> _Sketches | None:
        """The sketches of pipelines of these stages, all of which lack equally many units; kept.

        None where the stages have units of several stacks: what they take would not grow by the same.
        """
        if shares not in self._in_stages:
            try:
                runs = [of_stack for of_stack in self._builder.runs(shares) if of_stack]
            except Diagnostic:
                runs = []
            alike = len(runs) == 1 and len(runs[0]) == len(shares)
            self._in_stages[shares] = self._sketched(runs, min(1.0, self._worth)) if alike else None
        return self._in_stages[shares]

    def _sketched(self, runs: Sequence[Sequence[Stack]], worth: float) -> _Sketches | None:
        """The sketches of a step whose stacks have these runs of units; None if not worth it, or if there are none."""
        least = [min((run.units for run in of_stack), default=0) for of_stack in runs]
        lacking = {at: units - UNITS for at, units in enumerate(least) if units > UNITS}
        units = sum(stack.units for stack in self._builder.stacks)
        base = units - sum(lack * len(runs[at]) for at, lack in lacking.items())
        sketched = (1 + len(lacking)) * base + sum(len(runs[at]) for at in lacking)
        if not lacking or worth * sketched > units:
            return None

        def builder(*more: int) -> Builder | None:
            """Of the base with a unit more in each run of these stacks."""
            return self._builder.without((run, less - (at in more)) for at, less in lacking.items() for run in runs[at])

        found = [builder(), *map(builder, lacking)]
        deepest = found[-1] if len(lacking) == 1 else builder(*lacking)
        made = [each for each in found if each is not None]
        if deepest is None or len(made) < len(found):
            return None
        return _Sketches([runs[at] for at in lacking], deepest, list(zip(made, (0, *lacking.values()), strict=True)))

    def _priced(self, module: Module, config: Config) -> Sketch:
        stages = config.ranks_of_stages
        rates = [self._rates[self._machine.slowest_kind(ranks)] for ranks in stages]
        return sketch(module, config, rates, [self._machine.least_memory(ranks) for ranks in stages], self._fused)


def _shares_in(config: Config) -> tuple[int, ...]:
    """The shares of the stages of a plan."""
    return shares_of_stages(config.stage_shares, schedule_of(config.schedule, config.pp, config.micro_batches))


@dataclass(frozen=True, slots=True)
class _Sketches:
    """Steps with few units of each stack, from whose prices that of a deep one follows."""

    deep: Sequence[Sequence[Stack]]
    """The stacks of which they lack units, each as the runs that lack equally many."""
    deepest: Builder
    """Of the step with a unit more of every stack than the base."""
    builders: Sequence[tuple[Builder, int]]
    """Of the base, and of each with a unit more of one stack; how many units the base lacks in each run of it."""

    def partitioned(self, config: Config) -> list[tuple[Module, int]]:
        """The modules of a plan of each of these steps, and how many units the base lacks.

        All come from that of the deepest: what passes make of equal layers is equal. Where it is not, the passes make
        each.
        """
        deepest = self.deepest.partitioned(config)
        found: list[tuple[Module, int]] = []
        for more, (builder, lacking) in enumerate(self.builders, -1):
            others = [run for at, of_stack in enumerate(self.deep) if at != more for run in of_stack]
            found.append((_shorter(deepest, others) or builder.partitioned(config), lacking))
        return found


def _shorter(module: Module, stacks: Iterable[Stack]) -> Module | None:
    """A module with one more unit of these stacks than the base, without it; None where it has no such form."""
    found: Module | None = module
    for stack in stacks:
        found = found and shallow(found, replace(stack, units=UNITS + 1), UNITS)
    return found
