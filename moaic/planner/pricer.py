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
from moaic.passes.estimate.step_time import Prediction, function_seconds
from moaic.passes.estimate.structural import UNITS, Deeper, Sketch, extrapolated, sketch
from moaic.passes.perf.machine import Machine
from moaic.passes.pipeline.shares import Share
from moaic.passes.schedules import schedule_of
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.passes.transforms.shallow import Stack, shallow

WORTH = 2
"""A step is priced from sketches if it has as many times the units of all of these; a pipeline, if it has more."""


class Pricer:
    """Prices candidates of one step on one machine."""

    def __init__(self, step: Module, machine: Machine, worth: float = WORTH) -> None:
        self._machine = machine
        self._builder = Builder(step, coefficients_of(machine))
        self._fused = fused_functions()
        self._seconds = function_seconds(machine, self._fused)
        self._worth = worth
        self._sketches = self._sketched([[stack] for stack in self._builder.stacks], worth)
        self._deep = [stack for stack in self._builder.stacks if stack.units > UNITS]
        self._deepest = self._builder.without((stack, stack.units - UNITS - 1) for stack in self._deep)
        # To verify all layers of a deep step takes long; the selected plan is verified again before it runs.
        unverified = self._builder.without([]) if self._sketches else None
        self._of_whole = unverified or self._builder
        self._in_stages: dict[int, _Staged | None] = {}
        self._trains = bool(step.main.gradients)
        self._replicated: dict[Config, tuple[Sketch, list[Deeper]]] = {}
        self._shares: dict[int, list[Share]] = {}

    def price(self, config: Config) -> tuple[Memory, Prediction]:
        """Memory and time of the plan for `config`; raises Diagnostic with the reason where there is none."""
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
        found = self._staged(schedule_of(config.schedule, config.pp, config.micro_batches).stages)
        if found is None:
            return [(self._of_whole.partitioned(config), 0)]
        deeper = found.deeper.partitioned(config)
        return [(_shorter(deeper, found.runs) or found.base.partitioned(config), 0), (deeper, found.lacking)]

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
            found = self._sketches_of(unstaged(config))
            schedule = schedule_of(config.schedule, config.pp, config.micro_batches)
            stages = self._shares_of(schedule.stages)
        except Diagnostic:
            return StageBound()
        return StageBound() if found is None else bound_of_stages(config, schedule, stages, *found)

    def _shares_of(self, stages: int) -> list[Share]:
        """What each of so many stages has of the stacks that have deeper sketches."""
        if stages not in self._shares:
            self._shares[stages] = self._builder.shares(self._deep, stages)
        return self._shares[stages]

    def _sketches_of(self, config: Config) -> tuple[Sketch, list[Deeper]] | None:
        """The sketches of a plan, the base and the deeper ones; kept for bounds where no parameters are sharded."""
        if config in self._replicated:
            return self._replicated[config]
        if not self._sketches:
            return None
        base, *deeper = [Deeper(self._priced(module, config), lacking) for module, lacking in self.sketched(config)]
        found = base.sketch, deeper
        if config.distribute_param == "none":
            self._replicated[config] = found
        return found

    def sketched(self, config: Config) -> list[tuple[Module, int]]:
        """The modules of a plan of a deep step from which its price follows, each with the units that the base lacks.

        All come from one module with a unit more of every stack: what passes make of equal layers is equal. Where it is
        not, the passes make each.
        """
        assert self._deepest is not None, "a deep step without some units has one without a unit fewer"
        deepest = self._deepest.partitioned(config)
        found: list[tuple[Module, int]] = []
        for more, (builder, lacking) in enumerate(self._sketches, -1):
            others = (stack for at, stack in enumerate(self._deep) if at != more)
            found.append((_shorter(deepest, others) or builder.partitioned(config), lacking))
        return found

    def _staged(self, stages: int) -> _Staged | None:
        """The sketches of pipelines, all stages of which lack equally many units; kept.

        None where the stages have units of several stacks: what they take would not grow by the same.
        """
        if stages not in self._in_stages:
            try:
                runs = [of_stack for of_stack in self._builder.runs(stages) if of_stack]
            except Diagnostic:
                runs = []
            alike = len(runs) == 1 and len(runs[0]) == stages
            found = self._sketched(runs, min(1.0, self._worth)) if alike else ()
            self._in_stages[stages] = _Staged(runs[0], found[0][0], *found[1]) if found else None
        return self._in_stages[stages]

    def _sketched(self, runs: Sequence[Sequence[Stack]], worth: float) -> Sequence[tuple[Builder, int]]:
        """Builders of the base and of each deeper step, and how many units the base lacks in each run of a stack.

        Empty if they are not worth it, or if there is no such step.
        """
        least = [min((run.units for run in of_stack), default=0) for of_stack in runs]
        lacking = {at: units - UNITS for at, units in enumerate(least) if units > UNITS}
        units = sum(stack.units for stack in self._builder.stacks)
        base = units - sum(lack * len(runs[at]) for at, lack in lacking.items())
        sketched = (1 + len(lacking)) * base + sum(len(runs[at]) for at in lacking)
        if not lacking or worth * sketched > units:
            return ()
        found = [
            (
                self._builder.without((run, less - (at == more)) for at, less in lacking.items() for run in runs[at]),
                lack,
            )
            for more, lack in ((None, 0), *lacking.items())
        ]
        made = [(builder, lack) for builder, lack in found if builder is not None]
        return made if len(made) == len(found) else ()

    def _priced(self, module: Module, config: Config) -> Sketch:
        return sketch(module, config, self._machine, self._fused, self._seconds)


@dataclass(frozen=True, slots=True)
class _Staged:
    """The sketches of the pipelines with one number of stages."""

    runs: Sequence[Stack]
    """Of the one stack of layers, the units of each stage."""
    base: Builder
    deeper: Builder
    lacking: int
    """How many units the base lacks in each stage."""


def _shorter(module: Module, stacks: Iterable[Stack]) -> Module | None:
    """A module with one more unit of these stacks than the base, without it; None where it has no such form."""
    found: Module | None = module
    for stack in stacks:
        found = found and shallow(found, replace(stack, units=UNITS + 1), UNITS)
    return found
