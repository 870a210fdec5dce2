"""Lower bounds on the time and memory of a pipeline from the layers of a plan without one: no pipeline is built.

A stage is so many layers, and takes their time and memory; the schedule is simulated with these. Sends are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moaic.passes.config import Config
from moaic.passes.estimate.lower_bound import gathered, persistent
from moaic.passes.estimate.structural import UNITS, Deeper, Sketch, extrapolated
from moaic.passes.pipeline.shares import Share
from moaic.passes.schedules import Schedule

LEAST_SENT = 0.5
"""Share of what all-reduces of gradients take that other shardings of parameters take at least: scattered once."""

SHORTER = 0.99
"""Share of the time found here that a pipeline takes at least: layers are not quite alike."""

WAITING = 0.85
"""Share of the waiting: a stage sends a gradient on before it makes those of the parameters of its first layer."""

ROUNDING = 1e-6
"""Part of a layer by which a whole number of layers may be missed."""

LESS_KEPT = 0.92
"""Share of the activations of whole layers that a stage keeps at least."""


@dataclass(frozen=True, slots=True)
class Least:
    """What a plan takes at least."""

    seconds: float = 0.0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one unit of a stack takes: seconds for a micro-batch, and bytes where parameters are not sharded."""

    seconds: float
    parameters: int
    gradients: int
    optimizer: int
    saved: int


def least_of(
    config: Config, schedule: Schedule, stages: Sequence[Share], base: Sketch, deeper: Sequence[Deeper]
) -> Least:
    """What the pipeline `config` takes at least, from sketches of the plan that its stages share (`unstaged`).

    There is one deeper sketch for each stack of layers.
    """
    parts = config.micro_batches
    units = [_unit(base, each, parts) for each in deeper]
    outside = _seconds(base) / parts - sum(UNITS * unit.seconds for unit in units)
    seconds = [_of_stage(each, [unit.seconds for unit in units]) + each.others * max(0.0, outside) for each in stages]
    nbytes = [
        _nbytes(config, [stages[at] for at in own], units, schedule.unfinished(worker))
        for worker, own in enumerate(_owned(schedule))
    ]
    sums = LEAST_SENT * sum(each.lacking * (each.sketch.spent[0].over_dp - base.spent[0].over_dp) for each in deeper)
    busy = max(parts * sum(seconds[at] for at in own) for own in _owned(schedule))
    waiting = schedule.seconds(seconds) - busy
    return Least(SHORTER * (busy + WAITING * waiting + sums / config.pp), max(nbytes))


def _owned(schedule: Schedule) -> list[list[int]]:
    """By worker, its stages."""
    owned: list[list[int]] = [[] for _ in schedule.workers]
    for stage, worker in enumerate(schedule.owners):
        owned[worker].append(stage)
    return owned


def _unit(base: Sketch, deeper: Deeper, parts: int) -> _Unit:
    """What one more unit of a stack adds to a sketch with so many micro-batches."""
    less, more = base.held[0], deeper.sketch.held[0]
    parameters, gradients = more.parameters - less.parameters, more.gradients - less.gradients
    optimizer = more.optimizer - less.optimizer
    peaks = [found[0].joint for each in ([], [deeper]) if (found := extrapolated(base, each)) is not None]
    live = (peaks[-1] - peaks[0]) // deeper.lacking
    seconds = (_seconds(deeper.sketch) - _seconds(base)) / parts
    return _Unit(seconds, parameters, gradients, optimizer, max(0, live - parameters - gradients - optimizer))


def _seconds(sketch: Sketch) -> float:
    """Seconds of all micro-batches, without what is sent over `dp` once."""
    return sketch.spent[0].end - sketch.spent[0].over_dp


def _of_stage(stage: Share, values: Sequence[float]) -> float:
    return sum(count * value for count, value in zip(stage.units, values, strict=True))


def _nbytes(config: Config, own: Sequence[Share], units: Sequence[_Unit], unfinished: int) -> int:
    """Bytes of a worker with these stages that keeps the activations of so many forwards."""

    def held(values: Sequence[float]) -> float:
        return sum(_of_stage(stage, values) for stage in own)

    parameters, gradients = held([unit.parameters for unit in units]), held([unit.gradients for unit in units])
    optimizer = held([unit.optimizer for unit in units])
    # What a part of a layer keeps is not in proportion to its work.
    layers = [replace(stage, units=[int(count + ROUNDING) for count in stage.units]) for stage in own]
    kept = unfinished * min(_of_stage(stage, [unit.saved for unit in units]) for stage in layers)
    beside = persistent(config, parameters, optimizer) + gathered(config, parameters, gradients)
    return int(beside + LESS_KEPT * kept)
