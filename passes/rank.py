"""What one worker of a pipeline has to do of a program: its own instructions, and its halves of the sends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.ops import SEND


def homes(mesh: Mesh) -> list[dict[str, int]]:
    """Coordinates, on the axes that values have homes on, of ranks that may have different things to do."""
    return [{"pp": rank} for rank in range(mesh.size("pp"))]


def held(values: Iterable[Value], at: dict[str, int]) -> list[Value]:
    """Those of the values that the ranks at these coordinates hold."""
    return [value for value in values if value.type.layout.holds(at)]


def of_rank(main: Function, at: dict[str, int]) -> Function:
    """`main` as the ranks at these coordinates run it: a send has no result where it starts, no operand at its end."""
    ops = [each for op in main.ops if (each := _own(op, at)) is not None]
    return Function(main.name, tuple(held(main.params, at)), tuple(ops), tuple(held(main.results, at)))


def _own(op: Op, at: dict[str, int]) -> Op | None:
    results = tuple(held(op.results, at))
    if op.name != SEND:
        return op if len(results) == len(op.results) else None
    operands = tuple(held(op.inputs(), at))
    return replace(op, operands=operands, results=results) if operands or results else None
