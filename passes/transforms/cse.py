"""Common subexpression elimination: equal ops on the same values become one.

Inductor does so within a compiled function. A graph of eight-bit products computes the scale of an operand once for
each product, and would run the collectives of that scale as often.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from moaic.ir.graph import Function, Op, Value
from moaic.ir.op_names import SCALED_MM
from moaic.ir.printer import render_attr


def common_subexpressions_merged(function: Function) -> Function:
    """`function` without equal ops, if it has products of eight-bit floats. Results keep ops of their own.

    An op of the backward never merges with one of the forward: recomputation decides which values are saved.
    """
    if not any(op.name == SCALED_MM for op in function.ops):
        return function
    first: dict[Hashable, Op] = {}
    mapping: dict[Value, Value] = {}
    results = frozenset(function.results)
    ops: list[Op] = []
    for old in function.ops:
        op = old.with_operands(mapping)
        if op.name == "aten.clone" or results.intersection(op.results):
            ops.append(op)
            continue
        equal = first.setdefault(_key(op), op)
        if equal is op:
            ops.append(op)
        mapping.update(zip(op.results, equal.results, strict=True))
    return replace(function, ops=tuple(ops))


def _key(op: Op) -> Hashable:
    attrs = tuple((name, render_attr(value)) for name, value in sorted(op.attrs.items()))
    return op.name, op.operands, attrs, tuple(value.type for value in op.results), op.loc.side
