"""What a plan takes at least, known before it is made: the step of one device, shared out without any loss.

Splitting never makes less work under the prices of `cost`: what a rank does and keeps is at least its share, and
waiting in a pipeline comes on top. So a plan whose bound is above the memory, or above what another plan takes, need
not be made. Stages of a pipeline are thought to have parameters and work in equal shares.
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
        """Bytes at the fullest moment that are neither at rest nor gradients, all of which may be there by then."""
        held = self.memory
        return max(0, held.joint - held.parameters - held.optimizer - held.gradients)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Told by the step on one device (`alone`). What is not known bounds nothing."""

    by_config: Mapping[Config, Alone]

    def seconds(self, config: Config) -> float:
        """The least that a step takes under `config`."""
        known = self.by_config.get(alone(config))
        schedule = _schedule(config)
        stretch = schedule.stretch if schedule is not None else 1.0
        return 0.0 if known is None else known.seconds * stretch / config.ranks

    def nbytes(self, config: Config) -> int:
        """The least that the fullest worker needs under `config`."""
        known = self.by_config.get(alone(config))
        if known is None:
            return 0
        held, level = known.memory, config.distribute_param
        parts = config.pp * config.ep * config.tp
        trained = parts * (1 if level == "none" else config.dp)
        at_rest = held.parameters // (parts * (config.dp if level in GATHERING else 1)) + held.optimizer // trained
        gathered = held.parameters // parts if level == "step" else 0
        sums = held.gradients // parts if level == "none" and config.micro_batches > 1 else 0
        return at_rest + max(2 * held.gradients // trained, gathered + sums + _kept(known.activations, config))


def alone(config: Config) -> Config:
    """What of a configuration says how much one device computes and keeps."""
    return Config(recompute=config.recompute, loss_chunks=config.loss_chunks)


def _kept(activations: int, config: Config) -> int:
    """Activations that the fullest worker keeps, if stages are cut so as to make that least.

    With `a` bytes of a micro-batch's activations in all, workers that keep `n` micro-batches each are as full as each
    other when they hold shares of `a` in inverse proportion to their `n`.
    """
    schedule = _schedule(config)
    of_micro_batch = activations / (config.dp * config.ep * config.cp * config.tp * config.micro_batches)
    if schedule is None:
        return int(of_micro_batch)
    chunks = schedule.stages // config.pp
    return int(of_micro_batch / sum(chunks / schedule.unfinished(worker) for worker in range(config.pp)))


def _schedule(config: Config) -> Schedule | None:
    return _remembered(config.schedule, config.pp, config.micro_batches) if config.pp > 1 else None


@cache
def _remembered(name: str, workers: int, parts: int) -> Schedule | None:
    """None where there is no such schedule, which whoever makes the plan will say."""
    try:
        return schedule_of(name, workers, parts)
    except Diagnostic:
        return None
