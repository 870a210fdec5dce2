"""Advice, found by planning, for a step that does not fit: another plan, a larger flavor, a smaller batch."""

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
class OversizedStep:
    """A step, and plans of it that need more memory than the workers have."""

    step: Module
    request: Request
    sized: Sequence[Sized]
    tried: bool
    """Whether these are all plans that follow the request."""
    whole: bool = True
    """Whether the step is a whole model's, so that its rows are the user's batch."""


def advice(oversized: OversizedStep, machine: Machine, capacities: Sequence[Capacity], pool: CompilerPool) -> str:
    """Hints, the best first, for a user who has `machine` and can switch to the flavors of `capacities`."""
    found = [
        *_plan(oversized, machine, pool),
        _flavor(oversized, machine, capacities, pool),
        _batch(oversized, machine),
    ]
    return "\nhint: ".join(found)


def _plan(oversized: OversizedStep, machine: Machine, pool: CompilerPool) -> Iterator[str]:
    """Another plan on the same workers, if one fits."""
    if oversized.tried and oversized.request == Request():
        return
    found = least(oversized.step, machine, Request(), pool)
    if found is not None and found[1].peak <= machine.memory:
        config, memory = found
        yield f'take a plan that needs less, MOAI_PLAN="{config}": {mib(memory.peak)} per worker'


def _flavor(oversized: OversizedStep, machine: Machine, capacities: Sequence[Capacity], pool: CompilerPool) -> str:
    """The smallest flavor with more memory, in all or for each worker, on which a plan fits."""
    larger = [
        capacity
        for capacity in capacities
        if capacity.memory > machine.memory or capacity.flavor.workers > machine.workers
    ]
    smallest = 0
    for capacity in sorted(larger, key=lambda capacity: (capacity.flavor.memory, capacity.flavor.workers)):
        place = replace(machine, workers=capacity.flavor.workers, memory=capacity.memory)
        found = least(oversized.step, place, oversized.request, pool)
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


def _batch(oversized: OversizedStep, machine: Machine) -> str:
    """The largest batch with which a plan is expected to fit."""
    fitting = rows_that_fit(oversized.step, oversized.sized, machine.memory)
    if fitting and not oversized.whole:
        return "give smaller batches"
    if fitting:
        return f"give batches of at most {fitting} instead of {batch_size(oversized.step.main)}"
    model = model_bytes(oversized.step, smallest(oversized.sized))
    return (
        f"no smaller batch is expected to help: the model, with gradients and optimizer, takes {mib(model)} per worker"
    )
