"""A function written out in time: what each instruction belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.ir.graph import Function, Op
from moaic.ir.layout import Mesh
from moaic.ir.op_names import ALL_GATHER, ALL_REDUCE

MICRO_BATCHES, CHUNKS = "mb", "chunk"
"""Axes whose parts come one after the other: what is split over them runs once per part."""

PRE, POST = -1, -2

Phase = tuple[int, int]
"""What an instruction belongs to, and the chunk of the loss in it. Each PRE, POST or a number.

The number of an action: a micro-batch or, in a pipeline, one entry of the schedule.
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """Instructions of one function in order, and the phase of each."""

    function: Function
    mesh: Mesh
    phases: tuple[Phase, ...]


def finishes(op: Op, axis: str = MICRO_BATCHES) -> bool:
    """Whether an op makes one whole of what all parts over `axis` gave."""
    return op.name in (ALL_REDUCE, ALL_GATHER) and op.attrs["axis"] == axis
