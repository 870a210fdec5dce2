"""Prices of candidates: of a deep step from sketches of few of its layers, of any other from the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from moaic.passes.transforms.shallow import shallow

WORTH = 2
"""A step is priced from sketches if it has as many times the units of all sketches together."""


class Pricer:
    """Prices candidates of one step on one machine."""

    def __init__(self, step: Module, machine: Machine, worth: float = WORTH) -> None:
        self._machine = machine
        self._builder = Builder(step, coefficients_of(machine))
        self._fused = fused_functions()
        self._seconds = function_seconds(machine, self._fused)
        self._sketches = self._sketched(worth)
        self._trains = bool(step.main.gradients)
        self._replicated: dict[Config, tuple[Sketch, list[Deeper]]] = {}
        self._shares: dict[int, list[Share]] = {}

    def price(self, config: Config) -> tuple[Memory, Prediction]:
        """Memory and time of the plan for `config`; raises Diagnostic with the reason where there is none."""
        # Where stages are cut depends on the depth.
        found = self._from_sketches(config) if config.pp == 1 else None
        return found or self._whole(config)

    def _whole(self, config: Config) -> tuple[Memory, Prediction]:
        found = extrapolated(self._priced(self._builder.partitioned(config), config), [])
        assert found is not None, "a whole step has all instructions of itself"
        return found

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
            deep = [stack for stack in self._builder.stacks if stack.units > UNITS]
            self._shares[stages] = self._builder.shares(deep, stages)
        return self._shares[stages]

    def _sketches_of(self, config: Config) -> tuple[Sketch, list[Deeper]] | None:
        """The sketches of a plan, the base and the deeper ones; kept for bounds where no parameters are sharded."""
        if config in self._replicated:
            return self._replicated[config]
        if not self._sketches:
            return None
        (base, _), *rest = self._sketches
        modules = [(builder.partitioned(config), lacking) for builder, lacking in rest]
        first = self._shorter(modules[0][0]) or base.partitioned(config)
        deeper = [Deeper(self._priced(module, config), lacking) for module, lacking in modules]
        found = self._priced(first, config), deeper
        if config.distribute_param == "none":
            self._replicated[config] = found
        return found

    def _shorter(self, module: Module) -> Module | None:
        """The module of the base, from that of the first deeper step: what passes make of equal layers is equal.

        None where it is not.
        """
        stack = next(stack for stack in self._builder.stacks if stack.units > UNITS)
        return shallow(module, replace(stack, units=UNITS + 1), UNITS)

    def _sketched(self, worth: float) -> Sequence[tuple[Builder, int]]:
        """Builders of the base and of each deeper step, with the units that the base lacks; none if not worth it."""
        stacks = self._builder.stacks
        base = [min(stack.units, UNITS) for stack in stacks]
        lacking = {at: stack.units - UNITS for at, stack in enumerate(stacks) if stack.units > UNITS}
        sketched = (1 + len(lacking)) * sum(base) + len(lacking)
        if not lacking or worth * sketched > sum(stack.units for stack in stacks):
            return ()
        first = self._builder.shallow(base)
        deeper = [self._builder.shallow([units + (at == more) for at, units in enumerate(base)]) for more in lacking]
        found = [(each, lack) for each, lack in zip((first, *deeper), (0, *lacking.values()), strict=True) if each]
        return found if len(found) == 1 + len(deeper) else ()

    def _priced(self, module: Module, config: Config) -> Sketch:
        return sketch(module, config, self._machine, self._fused, self._seconds)
