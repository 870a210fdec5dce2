"""The instructions of one worker of a pipeline: those of its stage, and its halves of the sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ops import takes_part


def owner_coordinates(mesh: Mesh) -> list[dict[str, int]]:
    """Coordinates of the ranks whose instructions may differ: one for each owner on `pp`."""
    return [{"pp": rank} for rank in range(mesh.size("pp"))]


def ends_of(send: Op) -> tuple[int, int]:
    """The stages that a send goes from and to."""
    source, target = (value.type.layout.owner_on("pp") for value in (*send.inputs(), *send.results))
    assert source is not None
    assert target is not None
    return source, target


def held(values: Iterable[Value], coords: dict[str, int]) -> list[Value]:
    """The values that the ranks at these coordinates hold."""
    return [value for value in values if value.type.layout.holds(coords)]


def of_rank(main: Function, coords: dict[str, int]) -> Function:
    """`main` as the ranks at these coordinates run it: a send has no result where it starts, no operand at its end."""
    ops = tuple(_half(op, coords) if op.name == SEND else op for op in main.ops if takes_part(op, coords))
    return Function(main.name, tuple(held(main.params, coords)), ops, tuple(held(main.results, coords)))


def _half(send: Op, coords: dict[str, int]) -> Op:
    return replace(send, operands=tuple(held(send.inputs(), coords)), results=tuple(held(send.results, coords)))
