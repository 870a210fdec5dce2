"""Time and memory of a plan from a sketch of it: a step of few layers, of which three micro-batches are lowered.

A sketch is priced for all of its step's micro-batches: their instructions are simulated in order (`sequence`), though
most of them are never made. What one more layer adds is the difference of two sketches, and a plan's price is that of
its sketch with this difference for every layer that the sketch leaves out. The price is that of the written-out
program: `tests/planner/test_pricer.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moaic.ir.graph import Module
from moaic.passes.config import Config
from moaic.passes.estimate.held import Held, Profile, held_by
from moaic.passes.estimate.memory import FusedFunctions, Memory
from moaic.passes.estimate.sequence import Instructions
from moaic.passes.estimate.spent import Spent, spent_by
from moaic.passes.estimate.step_time import ROUNDING, Prediction, Rates, compile_seconds, optimizer_seconds
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import Halves, Programs, excerpt
from moaic.passes.perf.numbers import ZERO, Number, total
from moaic.passes.schedules import schedule_in

UNITS = 3
"""Units of every stack of layers in the base of the sketches; each deeper one has one more of one stack."""

PARTS = 3
"""Micro-batches of an excerpt: the first, the last, and one for all others."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Time and memory of every worker along `pp`, of a step with few layers."""

    spent: Sequence[Spent]
    held: Sequence[Held]
    optimizer: Number
    """Seconds of the assumed optimizer."""
    compiling: float
    """Seconds that compiling its functions takes."""
    limits: Sequence[int]
    """Bytes that each worker may use."""


def sketch(
    module: Module, config: Config, rates: Sequence[Rates], limits: Sequence[int], fused: FusedFunctions
) -> Sketch:
    """The prices of a partitioned module with all of its micro-batches.

    The workers along `pp` have these rates, and may use so many bytes.
    """
    lowered = excerpt(module, PARTS)
    step = Instructions(lowered, module.mesh.size(MICRO_BATCHES), schedule_in(module))
    overlaps = any(each.machine.overlaps for each in rates)
    order = step.overlapping() if overlaps else [*step.in_order()]
    plan = Plan(config, module, Programs(lowered.joint, lowered.joint_params, _no_halves))
    return Sketch(
        spent_by(step, order, rates),
        held_by(step, order, plan, fused),
        optimizer_seconds(plan, [each.machine for each in rates]),
        compile_seconds(lowered.joint),
        limits,
    )


def _no_halves() -> Halves:
    raise AssertionError("an excerpt is not run, and has no halves")


def extrapolated(base: Sketch, deeper: Sequence[Deeper]) -> tuple[Memory, Prediction] | None:
    """The prices of the whole step of which `base` is a sketch; None where the sketches have too little in common."""
    workers = range(len(base.spent))
    memories = [_memory(at, base, deeper) for at in workers]
    if None in memories:
        return None
    fullest = max((each for each in memories if each is not None), key=lambda each: each.peak / each.limit)
    last = max(workers, key=lambda at: _grown(base, deeper, lambda each: each.spent[at].end))
    compiling = _grown(base, deeper, lambda each: each.compiling)
    over_dp = _grown(base, deeper, lambda each: each.spent[last].over_dp)
    return fullest, Prediction(_parts(last, base, deeper), compiling, over_dp)


@dataclass(frozen=True, slots=True)
class Deeper:
    """The sketch with one more unit of one stack of layers, and how many units of it the base lacks."""

    sketch: Sketch
    lacking: int


def _grown(base: Sketch, deeper: Sequence[Deeper], value: Callable[[Sketch], float]) -> float:
    """At full depth, a value that grows by the same amount with every layer."""
    start = value(base)
    return start + sum(each.lacking * (value(each.sketch) - start) for each in deeper)


def _parts(worker: int, base: Sketch, deeper: Sequence[Deeper]) -> dict[str, Number]:
    def number(value: Callable[[Sketch], Number]) -> Number:
        sources = [value(each).source for each in (base, *(each.sketch for each in deeper))]
        return Number(max(0.0, _grown(base, deeper, lambda each: value(each).value)), max(sources))

    names = dict.fromkeys(
        part for each in (base, *(more.sketch for more in deeper)) for part in each.spent[worker].parts
    )
    parts = {name: number(lambda each, name=name: each.spent[worker].parts.get(name, ZERO)) for name in names}
    busy = sum(each.value for each in parts.values())
    exposed = number(lambda each: each.spent[worker].exposed)
    end = _grown(base, deeper, lambda each: each.spent[worker].end)
    if exposed.value:
        parts["collective"] = total([parts.get("collective", ZERO), exposed])
    if end - busy - exposed.value > ROUNDING * end:
        worst = max(each.source for each in parts.values())
        parts["bubble"] = Number(end - busy - exposed.value, worst)
    return {**parts, "optimizer": number(lambda each: each.optimizer)}


def _memory(worker: int, base: Sketch, deeper: Sequence[Deeper]) -> Memory | None:
    peaks = _peaks(base.held[worker].profile, [(each.sketch.held[worker].profile, each.lacking) for each in deeper])
    if peaks is None:
        return None

    def nbytes(value: Callable[[Held], int]) -> int:
        return round(_grown(base, deeper, lambda each: value(each.held[worker])))

    if len(deeper) == 1:
        # The instruction at the peak may have no match. A maximum of what grows evenly grows ever faster.
        peaks.append(nbytes(lambda held: max((live for _, live in held.profile), default=0)))
    return Memory(
        nbytes(lambda held: held.parameters),
        nbytes(lambda held: held.gradients),
        nbytes(lambda held: held.optimizer),
        max([nbytes(lambda held: held.before), *peaks]),
        base.limits[worker],
    )


def _peaks(base: Profile, deeper: Sequence[tuple[Profile, int]]) -> list[int] | None:
    """The bytes that are live at full depth while the instructions of the base run.

    Between the first and the last layer of a run the live bytes grow, or fall, by the same amount from layer to layer,
    so that these two have the most: a base of three layers has them, and knows by how much they grow with the depth.
    """
    peaks = [nbytes for _, nbytes in base]
    for profile, lacking in deeper:
        matches = _matches(base, profile)
        if matches is None:
            return None
        for index, (_, nbytes) in enumerate(base):
            peaks[index] += lacking * (min(profile[place][1] for place in matches[index]) - nbytes)
    return peaks


def _matches(base: Profile, deeper: Profile) -> list[set[int]] | None:
    """For every instruction of the base its places in the deeper profile; None where they have too little in common.

    In each run of layers the first third is matched from the begin, the last from the end, the second from both:

        base    embed  a0 a1 a2       loss  b2 b1 b0
        deeper  embed  a0 a1 a2 a3    loss  b3 b2 b1 b0
        matches embed  a0 ·  a3       loss  b3 ·  b0
    """
    early, late = _subsequence(base, deeper), _subsequence(base[::-1], deeper[::-1])
    if early is None or late is None:
        return None
    late = [len(deeper) - 1 - place for place in reversed(late)]
    matches = [{place} for place in early]
    start = 0
    for index in range(1, len(base) + 1):
        if index == len(base) or (early[index] == late[index]) != (early[start] == late[start]):
            third = (index - start + 2) // 3
            for at in range(start + third, index - third):
                matches[at].add(late[at])
            for at in range(max(start + third, index - third), index):
                matches[at] = {late[at]}
            start = index
    return matches


def _subsequence(base: Profile, deeper: Profile) -> list[int] | None:
    """For every instruction of the base the first place in the deeper profile that keeps their order."""
    found: list[int] = []
    place = 0
    for kind, _ in base:
        while place < len(deeper) and deeper[place][0] != kind:
            place += 1
        if place == len(deeper):
            return None
        found.append(place)
        place += 1
    return found
