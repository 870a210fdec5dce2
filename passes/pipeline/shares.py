"""What part of a model each stage of a pipeline has, before any stage is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moaic.ir.graph import Module, Op
from moaic.passes.pipeline.inline_layers import with_layers_inlined
from moaic.passes.pipeline.spine import Spine
from moaic.passes.transforms.outline import layer_of
from moaic.passes.transforms.shallow import Stack


@dataclass(frozen=True, slots=True)
class Share:
    """What part of a model a stage has."""

    units: Sequence[float]
    """By stack, the number of its units, which a boundary may divide."""
    others: float
    """Share of the cost of what is outside of these stacks."""


def shares(module: Module, stacks: Sequence[Stack], wanted: Sequence[int]) -> list[Share]:
    """What stages of these relative sizes have of an outlined step; raises Diagnostic where it cannot be cut so."""
    module, stages = with_layers_inlined(module, wanted), len(wanted)
    spine = Spine(module, module.main)
    cut = spine.cut(wanted)
    costs = [[0.0] * stages for _ in (*stacks, None)]
    for position, cost in zip(spine.positions, spine.costs, strict=True):
        costs[_stack(module.main.ops[position], stacks)][cut[position]] += cost
    *inside, outside = costs
    units = [
        [stack.units * cost / sum(of_stack) for cost in of_stack]
        for stack, of_stack in zip(stacks, inside, strict=True)
    ]
    whole = sum(outside) or 1.0
    return [Share([of_stack[stage] for of_stack in units], outside[stage] / whole) for stage in range(stages)]


def _stack(op: Op, stacks: Sequence[Stack]) -> int:
    """The place among the stacks of the one that an op is in; -1 if it is in none."""
    place = layer_of(op.loc.module)
    return next((at for at, stack in enumerate(stacks) if place is not None and stack.has(*place)), -1)
