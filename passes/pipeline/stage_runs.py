"""The units of stacks that each stage of a pipeline has whole, from which some can be left out without another cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from moaic.ir.graph import Module
from moaic.passes.pipeline.inline_layers import with_layers_inlined
from moaic.passes.pipeline.spine import Spine
from moaic.passes.transforms.outline import layer_of
from moaic.passes.transforms.shallow import Stack


def runs_of(module: Module, stacks: Sequence[Stack], shares: Sequence[int]) -> list[list[Stack]]:
    """By stack, its runs of units that are whole in one stage; raises Diagnostic where there are not so many stages."""
    module = with_layers_inlined(module, shares)
    cut = Spine(module, module.main).cut(shares)
    places: dict[tuple[str, int], set[int | None]] = defaultdict(set)
    for position, stage in cut.items():
        op = module.main.ops[position]
        if (place := layer_of(op.loc.module)) is not None:
            # A boundary goes through layers that are inlined.
            places[place].add(stage if op.name == "call" else None)
    return [_runs(stack, [_stage(stack, unit, places) for unit in range(stack.units)]) for stack in stacks]


def _stage(stack: Stack, unit: int, places: dict[tuple[str, int], set[int | None]]) -> int | None:
    """The stage that a unit is in; None if it is in several."""
    first = stack.first + unit * stack.period
    stages = set[int | None]().union(*(places[stack.container, first + layer] for layer in range(stack.period)))
    return next(iter(stages)) if len(stages) == 1 else None


def _runs(stack: Stack, stages: Sequence[int | None]) -> list[Stack]:
    runs: list[Stack] = []
    for stage, units in groupby(range(stack.units), stages.__getitem__):
        numbers = list(units)
        if stage is not None:
            runs.append(replace(stack, first=stack.first + numbers[0] * stack.period, units=len(numbers)))
    return runs
