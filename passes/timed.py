"""A function written out in time: what each instruction belongs to."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.ir.collectives import ALL_GATHER, ALL_REDUCE
from moaic.ir.graph import Function, Op
from moaic.ir.layout import Mesh

PRE, POST = -1, -2


@dataclass(frozen=True, slots=True)
class Timed:
    """Instructions of one function in order, each with what it belongs to: PRE, POST or the number of an action.

    An action is a micro-batch or, in a pipeline, one entry of the schedule.
    """

    function: Function
    mesh: Mesh
    phases: tuple[int, ...]


def finishes(op: Op, axis: str = "mb") -> bool:
    """Whether an op makes one whole of what all parts over `axis` gave."""
    return op.name in (ALL_REDUCE, ALL_GATHER) and op.attrs["axis"] == axis
