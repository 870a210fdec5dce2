"""The order in which workers that compute while data is on its way do a program's instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from moaic.ir.collectives import ALL_GATHER
from moaic.ir.graph import Function, Module, Op
from moaic.ir.layout import Home


def fetched_ahead(main: Function) -> list[int]:
    """Positions of the instructions: what is gathered comes one function earlier, to be on its way while that runs.

    Legal where it is there before that function, and all else keeps its order. So come parameters, and what they are
    cast to before they are gathered.
    """
    order: list[int] = []
    for position, op in enumerate(main.ops):
        at = _one_function_earlier(main, order, op) if op.name == ALL_GATHER else len(order)
        order.insert(at, position)
    return order


def _one_function_earlier(main: Function, order: Sequence[int], op: Op) -> int:
    """Where the last function begins that the ranks of `op` run; the end if it or what follows makes an operand."""
    home, operands = op.results[0].type.layout.home, set(op.inputs())
    for at in reversed(range(len(order))):
        before = main.ops[order[at]]
        if not operands.isdisjoint(before.results):
            break
        if before.name == "call" and meet(home, before):
            return at
    return len(order)


def ahead(program: Module) -> Module:
    """`program` with its instructions in that order."""
    *others, main = program.functions
    ops = tuple(main.ops[position] for position in fetched_ahead(main))
    return replace(program, functions=(*others, replace(main, ops=ops)))


def meet(home: Home, op: Op) -> bool:
    """Whether some rank of a home has something to do with an op."""
    here = dict(home)
    homes = [value.type.layout.home for value in (*op.inputs(), *op.results)]
    return any(all(here.get(axis, at) == at for axis, at in other) for other in homes)
