"""Lower bounds on the time and memory of a pipeline from the layers of a plan without one: no pipeline is built.

A stage is so many layers, and takes their time and memory; the schedule is simulated with these. Sends are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moaic.passes.config import Config
from moaic.passes.estimate.lower_bound import gathered, persistent
from moaic.passes.estimate.structural import UNITS, Deeper, Sketch, extrapolated
from moaic.passes.pipeline.shares import Share
from moaic.passes.schedules import LiveState, Schedule

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
class StageBound:
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


def bound_of_stages(
    config: Config, schedule: Schedule, stages: Sequence[Share], base: Sketch, deeper: Sequence[Deeper]
) -> StageBound:
    """What the pipeline `config` takes at least, from sketches of the plan that its stages share (`unstaged`).

    There is one deeper sketch for each stack of layers.
    """
    parts = config.micro_batches
    units = [_unit(base, each, parts) for each in deeper]
    outside = _seconds(base) / parts - sum(UNITS * unit.seconds for unit in units)
    seconds = [_sum(each.units, [unit.seconds for unit in units]) + each.others * max(0.0, outside) for each in stages]
    nbytes = [_nbytes(config, states, stages, units) for states in schedule.live_states]
    sums = LEAST_SENT * sum(each.lacking * (each.sketch.spent[0].over_dp - base.spent[0].over_dp) for each in deeper)
    busy = max(parts * sum(seconds[at] for at in states[0].stages) for states in schedule.live_states)
    waiting = schedule.seconds(seconds) - busy
    return StageBound(SHORTER * (busy + WAITING * waiting + sums / config.pp), max(nbytes))


def _unit(base: Sketch, deeper: Deeper, parts: int) -> _Unit:
    """What one more unit of a stack adds to a sketch with so many micro-batches."""
    less, more = base.held[0], deeper.sketch.held[0]
    parameters, gradients = more.parameters - less.parameters, more.gradients - less.gradients
    optimizer = more.optimizer - less.optimizer
    peaks = [found[0].joint for each in ([], [deeper]) if (found := extrapolated(base, each)) is not None]
    # Sums of gradients, and values that all micro-batches read, are there once, however many forwards are unfinished.
    saved = (peaks[-1] - peaks[0]) // deeper.lacking - (more.between - less.between)
    seconds = (_seconds(deeper.sketch) - _seconds(base)) / parts
    return _Unit(seconds, parameters, gradients, optimizer, max(0, saved))


def _seconds(sketch: Sketch) -> float:
    """Seconds of what runs for each micro-batch, in all of them."""
    return max(0.0, sketch.spent[0].end - sketch.spent[0].once)


def _sum(counts: Sequence[float], values: Sequence[float]) -> float:
    return sum(count * value for count, value in zip(counts, values, strict=True))


def _nbytes(config: Config, states: Sequence[LiveState], stages: Sequence[Share], units: Sequence[_Unit]) -> int:
    """Bytes of a worker that comes into these states."""
    # What a part of a layer keeps is not in proportion to its work.
    whole = [[int(count + ROUNDING) for count in stage.units] for stage in stages]
    saved = [LESS_KEPT * _sum(counts, [unit.saved for unit in units]) for counts in whole]
    own = states[0].stages

    def held(values: Sequence[float]) -> float:
        return sum(_sum(stages[at].units, values) for at in own)

    parameters, optimizer = held([unit.parameters for unit in units]), held([unit.optimizer for unit in units])
    sums = [gathered(config, 0.0, _sum(stage.units, [unit.gradients for unit in units])) for stage in stages]
    beside = persistent(config, parameters, optimizer) + gathered(config, parameters, 0.0)
    kept = 1.0 if config.distribute_param == "none" else 1 / config.dp
    return int(beside + max(_live(state, saved, sums, kept) for state in states))


def _live(state: LiveState, saved: Sequence[float], sums: Sequence[float], kept: float) -> float:
    """The bytes that a worker has in a state if these are the bytes of its stages.

    A forward saves activations until its backward; the first gradients of a stage begin its sums over micro-batches,
    and after the last ones this share of them is `kept`.
    """
    live = 0.0
    for stage, forwards, begun, finished in zip(
        state.stages, state.unfinished, state.begun, state.finished, strict=True
    ):
        live += forwards * saved[stage] + begun * (kept if finished else 1.0) * sums[stage]
    return live
