"""Lower bounds on the time and memory of a plan before it is built: the step of one device, divided without any loss.

Sharding never reduces the predicted work: a rank computes and holds at least its share, and pipeline bubbles come on
top. A plan whose bound exceeds the memory, or the time of another plan, need not be built. Stages of a pipeline are
assumed to have equal shares of parameters and work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from moaic.ir.errors import Diagnostic
from moaic.passes.config import GATHERING, Config
from moaic.passes.estimate.memory import Memory
from moaic.passes.schedules import schedule_of


@dataclass(frozen=True, slots=True)
class Alone:
    """The step on one device: its seconds, and its memory."""

    seconds: float
    memory: Memory

    @property
    def activations(self) -> int:
        """Bytes at the peak that are neither persistent nor gradients; all gradients may exist at the peak."""
        held = self.memory
        return max(0, held.joint - held.parameters - held.optimizer - held.gradients)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds from the step on one device (`alone`). A configuration that is not known has the bound zero."""

    by_config: Mapping[Config, Alone]
    simpler: Mapping[Config, float] = field(default_factory=dict[Config, float])
    """Seconds of plans that do no more work than others (`unstaged`, `least`)."""

    def seconds(self, config: Config) -> float:
        """Lower bound on the seconds of a step under `config`."""
        known = self.by_config.get(alone(config))
        share = _shape(config).stretch / config.pp
        alone_bound = 0.0 if known is None else known.seconds * config.pp / config.ranks
        return share * max(alone_bound, *(self.simpler.get(each, 0.0) for each in (unstaged(config), least(config))))

    def nbytes(self, config: Config) -> int:
        """Lower bound on the peak bytes of a worker under `config`."""
        known = self.by_config.get(alone(config))
        if known is None:
            return 0
        held, level = known.memory, config.distribute_param
        parts = config.pp * config.ep * config.tp
        trained = parts * (1 if level == "none" else config.dp)
        persistent = held.parameters // (parts * (config.dp if level in GATHERING else 1)) + held.optimizer // trained
        gathered = held.parameters // (parts * _narrower(config)) if level == "step" else 0
        sums = held.gradients // parts if level == "none" and config.micro_batches > 1 else 0
        return persistent + max(2 * held.gradients // trained, gathered + sums + _kept(known.activations, config))


def _narrower(config: Config) -> int:
    """How many times narrower gathered parameters may be: eight bits instead of 32."""
    return 4 if config.distribute_low_prec_param else 1


def unstaged(config: Config) -> Config:
    """The plan whose work the stages of `config` share, on as many times fewer ranks: they can do no less than that."""
    return replace(config, pp=1, schedule=Config().schedule, distribute_param="none", distribute_low_prec_param=False)


def least(config: Config) -> Config:
    """The plan on the same mesh, stages left out, that computes and sends least: whatever it needs in memory."""
    return replace(unstaged(config), micro_batches=1, recompute="saved", gather_keys=True, loss_chunks=1)


def fewer_bytes(memory: Memory, more: float) -> int:
    """Lower bound on the peak of a plan with `more` times as many micro-batches as the plan that needs `memory`.

    No value becomes smaller than in proportion to its rows; parameters and optimizer state do not become smaller.
    """
    stays = memory.parameters + memory.optimizer
    return max(memory.step, stays + int((memory.joint - stays) / more))


def alone(config: Config) -> Config:
    """The decisions of `config` that change how much one device computes and holds."""
    return Config(recompute=config.recompute, loss_chunks=config.loss_chunks)


def _kept(activations: int, config: Config) -> int:
    """Bytes of activations on the fullest worker, if stages are cut such that these are minimal."""
    of_micro_batch = activations / (config.dp * config.ep * config.cp * config.tp * config.micro_batches)
    return int(of_micro_batch * _shape(config).kept)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the schedule of a configuration does to time and memory."""

    stretch: float = 1.0
    kept: float = 1.0
    """Activations of whole micro-batches that the fullest worker holds.

    Workers that keep `n` micro-batches hold equally many bytes when their shares of a micro-batch's activations are in
    inverse proportion to their `n`.
    """


def _shape(config: Config) -> _Shape:
    return _cached_shape(config.schedule, config.pp, config.micro_batches) if config.pp > 1 else _Shape()


@cache
def _cached_shape(name: str, workers: int, parts: int) -> _Shape:
    """The shape of a schedule; where there is no such schedule, building the plan raises the error."""
    try:
        schedule = schedule_of(name, workers, parts)
    except Diagnostic:
        return _Shape()
    chunks = schedule.stages // workers
    return _Shape(schedule.stretch, 1 / sum(chunks / schedule.unfinished(worker) for worker in range(workers)))
