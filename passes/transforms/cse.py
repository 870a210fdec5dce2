"""Make once what is made twice: ops that do the same to the same values give one value.

Inductor does so within a function. A graph that scales what it casts to eight bits, once for each product that reads
it, would send what the scale is found from as often.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from moaic.ir.graph import Function, Op, Value
from moaic.ir.op_names import SCALED_MM
from moaic.ir.printer import render_attr


def once(function: Function) -> Function:
    """A captured function without twins, if it has products of eight-bit floats. Results keep ops of their own.

    What a backward makes again of what a forward made is no twin: whether it is kept is for recomputation to say.
    """
    if not any(op.name == SCALED_MM for op in function.ops):
        return function
    known: dict[Hashable, Op] = {}
    same: dict[Value, Value] = {}
    results = frozenset(function.results)
    ops: list[Op] = []
    for old in function.ops:
        op = old.with_operands(same)
        if op.name == "aten.clone" or results.intersection(op.results):
            ops.append(op)
            continue
        twin = known.setdefault(_does(op), op)
        if twin is op:
            ops.append(op)
        same.update(zip(op.results, twin.results, strict=True))
    return replace(function, ops=tuple(ops))


def _does(op: Op) -> Hashable:
    attrs = tuple((name, render_attr(value)) for name, value in sorted(op.attrs.items()))
    return op.name, op.operands, attrs, tuple(value.type for value in op.results), op.loc.side
