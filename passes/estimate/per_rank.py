"""What one worker of a pipeline has to do of a program: its own instructions, and its halves of the sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.ops import takes_part


def homes(mesh: Mesh) -> list[dict[str, int]]:
    """Coordinates, on the axes that values have homes on, of ranks that may have different things to do."""
    return [{"pp": rank} for rank in range(mesh.size("pp"))]


def held(values: Iterable[Value], at: dict[str, int]) -> list[Value]:
    """Those of the values that the ranks at these coordinates hold."""
    return [value for value in values if value.type.layout.holds(at)]


def of_rank(main: Function, at: dict[str, int]) -> Function:
    """`main` as the ranks at these coordinates run it: a send has no result where it starts, no operand at its end."""
    ops = tuple(_half(op, at) if op.name == SEND else op for op in main.ops if takes_part(op, at))
    return Function(main.name, tuple(held(main.params, at)), ops, tuple(held(main.results, at)))


def _half(send: Op, at: dict[str, int]) -> Op:
    return replace(send, operands=tuple(held(send.inputs(), at)), results=tuple(held(send.results, at)))
