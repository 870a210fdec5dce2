"""Lower bounds on the time and memory of a plan before it is built: the step of one device, divided without any loss.

Sharding never reduces the predicted work: a rank computes and holds at least its share, and pipeline bubbles come on
top. A plan whose bound exceeds the memory, or the time of another plan, need not be built. Stages of a pipeline are
assumed to have equal shares of parameters and work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from moaic.ir.errors import Diagnostic
from moaic.passes.config import GATHERING, Config
from moaic.passes.estimate.memory import Memory
from moaic.passes.schedules import Schedule, schedule_of


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

    def seconds(self, config: Config) -> float:
        """Lower bound on the seconds of a step under `config`."""
        known = self.by_config.get(alone(config))
        schedule = _schedule(config)
        stretch = schedule.stretch if schedule is not None else 1.0
        return 0.0 if known is None else known.seconds * stretch / config.ranks

    def nbytes(self, config: Config) -> int:
        """Lower bound on the peak bytes of a worker under `config`."""
        known = self.by_config.get(alone(config))
        if known is None:
            return 0
        held, level = known.memory, config.distribute_param
        parts = config.pp * config.ep * config.tp
        trained = parts * (1 if level == "none" else config.dp)
        persistent = held.parameters // (parts * (config.dp if level in GATHERING else 1)) + held.optimizer // trained
        gathered = held.parameters // parts if level == "step" else 0
        sums = held.gradients // parts if level == "none" and config.micro_batches > 1 else 0
        return persistent + max(2 * held.gradients // trained, gathered + sums + _kept(known.activations, config))


def alone(config: Config) -> Config:
    """The decisions of `config` that change how much one device computes and holds."""
    return Config(recompute=config.recompute, loss_chunks=config.loss_chunks)


def _kept(activations: int, config: Config) -> int:
    """Bytes of activations on the fullest worker, if stages are cut such that these are minimal.

    Workers that keep `n` micro-batches hold equally many bytes when their shares of a micro-batch's activations are in
    inverse proportion to their `n`.
    """
    schedule = _schedule(config)
    of_micro_batch = activations / (config.dp * config.ep * config.cp * config.tp * config.micro_batches)
    if schedule is None:
        return int(of_micro_batch)
    chunks = schedule.stages // config.pp
    return int(of_micro_batch / sum(chunks / schedule.unfinished(worker) for worker in range(config.pp)))


def _schedule(config: Config) -> Schedule | None:
    return _cached_schedule(config.schedule, config.pp, config.micro_batches) if config.pp > 1 else None


@cache
def _cached_schedule(name: str, workers: int, parts: int) -> Schedule | None:
    """None where there is no such schedule; building the plan raises the error."""
    try:
        return schedule_of(name, workers, parts)
    except Diagnostic:
        return None
