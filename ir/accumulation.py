"""Sums that a function is given and adds to: the result may lie where the sum lay, so that nothing is written anew."""

from __future__ import annotations

from collections.abc import Mapping

from moaic.ir.graph import Function, Value
from moaic.ir.op_names import ADD_TO


def overwritten(function: Function) -> list[int]:
    """Positions of the parameters over which the function, compiled, may write results."""
    taken = set(taken_over(function).values())
    return [position for position, param in enumerate(function.params) if param in taken]


def taken_over(function: Function) -> Mapping[Value, Value]:
    """For every result of `moai.add_to` that takes the memory of a parameter: which one.

    That parameter is read by nothing else, and whoever calls the function has no use for it any more, or gives a copy.
    """
    adds = [op for op in function.ops if op.name == ADD_TO]
    if not adds:
        return {}
    params = set(function.params)
    reads = function.reads()
    found: dict[Value, Value] = {}
    for op in adds:
        (result,), total = op.results, next(op.inputs())
        if total in params and reads[total] == 1 and total.type == result.type and result in reads:
            found[result] = total
    return found
