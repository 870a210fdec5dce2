"""The order in which workers that compute while data is on its way do a program's instructions."""

from __future__ import annotations

from dataclasses import replace

from moaic.ir.collectives import ALL_GATHER
from moaic.ir.graph import Function, Module, Op
from moaic.ir.layout import Home


def fetched_ahead(main: Function) -> list[int]:
    """Positions of the instructions: gathers of parameters come one function earlier, to be on their way while it runs.

    Legal as parameters are there from the start, and all else keeps its order.
    """
    params = set(main.params)
    order: list[int] = []
    for position, op in enumerate(main.ops):
        if op.name == ALL_GATHER and params.issuperset(op.inputs()):
            home = op.results[0].type.layout.home
            calls = (at for at in reversed(range(len(order))) if _runs(home, main.ops[order[at]]))
            order.insert(next(calls, len(order)), position)
        else:
            order.append(position)
    return order


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


def _runs(home: Home, op: Op) -> bool:
    return op.name == "call" and meet(home, op)
