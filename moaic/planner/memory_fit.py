"""Estimates of what makes a step fit in memory, other workers or fewer rows, from the predicted memory of plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import GATHERING, Config, Request
from moaic.passes.estimate.memory import Memory
from moaic.passes.perf.machine import Machine
from moaic.passes.schedules import SCHEDULES
from moaic.passes.sharding.data_parallel import batch_size
from moaic.planner.candidates import candidates
from moaic.planner.worker import CompilerPool

Sized = tuple[Config, Memory]
"""A candidate and its predicted memory."""


def least(step: Module, machine: Machine, request: Request, pool: CompilerPool) -> Sized | None:
    """The plan with the least peak per worker, whether it fits or not; None where no plan is possible."""
    try:
        configs = frugal(candidates(step, machine.workers, request))
    except Diagnostic:
        return None
    pool.begin(step, machine)
    made = zip(configs, pool.compile(configs), strict=True)
    sized = [(config, result.memory) for config, result in made if result.memory is not None]
    return min(sized, key=lambda each: each[1].peak, default=None)


def frugal(configs: Iterable[Config]) -> list[Config]:
    """The candidates of each mesh that keep the least in memory."""
    given = list(configs)
    most: dict[Config, tuple[int, ...]] = {}
    for config in given:
        most[config.mesh] = max(_frugality(config), most.get(config.mesh, ()))
    return [config for config in given if _frugality(config) == most[config.mesh]]


def _frugality(config: Config) -> tuple[int, ...]:
    """A rank by memory, larger is less: more micro-batches, then sharded parameters, then a simpler schedule."""
    schedule = [*SCHEDULES, config.schedule].index(config.schedule)
    return config.micro_batches, config.distribute_param != "none", -schedule


def rows_that_fit(step: Module, sized: Sequence[Sized], limit: int) -> int:
    """The largest batch, smaller than the step's, with which the smallest plan is expected to fit; 0 if there is none.

    The peak is modelled as the bytes of the model plus a part proportional to the rows.
    """
    rows = batch_size(step.main)
    config, memory = smallest(sized)
    stays = model_bytes(step, (config, memory))
    if stays >= limit:
        return 0
    fitting = int(rows * (limit - stays) / max(1, memory.joint - stays))
    parts = config.dp * config.micro_batches
    return min(fitting, rows - 1) // parts * parts


def smallest(sized: Sequence[Sized]) -> Sized:
    return min(sized, key=lambda each: each[1].peak)


def model_bytes(step: Module, of: Sized) -> int:
    """Upper bound of the bytes per worker that do not depend on the batch, gathered parameters among them."""
    config, memory = of
    main = step.main
    parts = config.pp * config.ep * config.tp
    whole = sum(value.type.nbytes() for at, value in enumerate(main.params) if main.param_role(at).kind == "param")
    made = sum(main.results[at].type.nbytes() for at in main.gradients)
    gathered = whole // parts if config.distribute_param in GATHERING else 0
    return max(memory.step, memory.parameters + gathered + max(memory.gradients, made // parts) + memory.optimizer)
