"""Ways out of too little memory, found by planning: a flavor on which a plan fits, a batch that fits, freer options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.passes.perf.machine import Machine
from moaic.passes.sharding.data_parallel import batch_size
from moaic.planner.memory_fit import Sized, least, model_bytes, rows_that_fit, smallest
from moaic.planner.worker import CompilerPool
from moaic.runtime.host.flavors import Flavor
from moaic.text.units import mib


@dataclass(frozen=True, slots=True)
class Capacity:
    """A flavor and the bytes that each of its workers can give to tensors."""

    flavor: Flavor
    memory: int


@dataclass(frozen=True, slots=True)
class Need:
    """A step, and plans of it that need more memory than there is."""

    step: Module
    request: Request
    sized: Sequence[Sized]
    tried: bool
    """Whether these are all plans that keep to the request."""
    whole: bool = True
    """Whether the step is a whole model's, so that its rows are the person's batch."""


def ways_out(need: Need, machine: Machine, capacities: Sequence[Capacity], pool: CompilerPool) -> str:
    """Hints for a user who has `machine` and could have the flavors of `capacities`, one to a line, the best first."""
    found = [*_plan(need, machine, pool), _flavor(need, machine, capacities, pool), _batch(need, machine)]
    return "\nhint: ".join(found)


def _plan(need: Need, machine: Machine, pool: CompilerPool) -> Iterator[str]:
    """Another plan on the same workers, if one fits."""
    if need.tried and need.request == Request():
        return
    found = least(need.step, machine, Request(), pool)
    if found is not None and found[1].peak <= machine.memory:
        config, memory = found
        yield f'take a plan that needs less, MOAI_PLAN="{config}": {mib(memory.peak)} per worker'


def _flavor(need: Need, machine: Machine, capacities: Sequence[Capacity], pool: CompilerPool) -> str:
    """The smallest flavor with more memory, in all or for each worker, on which a plan fits."""
    larger = [
        capacity
        for capacity in capacities
        if capacity.memory > machine.memory or capacity.flavor.workers > machine.workers
    ]
    smallest = 0
    for capacity in sorted(larger, key=lambda capacity: (capacity.flavor.memory, capacity.flavor.workers)):
        place = replace(machine, workers=capacity.flavor.workers, memory=capacity.memory)
        found = least(need.step, place, need.request, pool)
        if found is None:
            continue
        config, memory = found
        if memory.peak <= capacity.memory:
            return (
                f"switch to a flavor that fits, `moai-switch-model -M {capacity.flavor.name}`: on its "
                f"{capacity.flavor.workers} workers {config} needs {mib(memory.peak)} each, and there are "
                f"{mib(capacity.memory)}"
            )
        smallest = min(smallest or memory.peak, memory.peak)
    least_need = f": the least that any plan needs is {mib(smallest)} per worker" if smallest else ""
    return f"no flavor of this machine is large enough{least_need}"


def _batch(need: Need, machine: Machine) -> str:
    """The largest batch of which a plan should fit."""
    fitting = rows_that_fit(need.step, need.sized, machine.memory)
    if fitting and not need.whole:
        return "give smaller batches"
    if fitting:
        return f"give batches of at most {fitting} instead of {batch_size(need.step.main)}"
    model = model_bytes(need.step, smallest(need.sized))
    return (
        f"no smaller batch is expected to help: the model, with gradients and optimizer, takes {mib(model)} per worker"
    )
