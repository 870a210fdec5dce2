"""A function whose loop axes are unrolled: every instruction with the part of the loop that it belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.ir.graph import Function, Op
from moaic.ir.layout import Mesh
from moaic.ir.op_names import ALL_GATHER, ALL_REDUCE

MICRO_BATCHES, CHUNKS = "mb", "chunk"
"""Loop axes: an op with a sharded value runs once per part, one part after the other."""

PROLOGUE, EPILOGUE = -1, -2
"""Phases before the first part and after the last."""

Phase = tuple[int, int]
"""The phase of an instruction over micro-batches, then over chunks of the loss: PROLOGUE, EPILOGUE or a number.

Over micro-batches the number is that of a micro-batch or, in a pipeline, of an entry of the schedule.
"""


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A function without loop axes, and the phase of each of its instructions."""

    function: Function
    mesh: Mesh
    phases: tuple[Phase, ...]


def combines_parts(op: Op, axis: str = MICRO_BATCHES) -> bool:
    """Whether an op makes the complete value from those of all parts over a loop axis."""
    return op.name in (ALL_REDUCE, ALL_GATHER) and op.attrs["axis"] == axis
