"""Sums that a function takes and adds to: the result may reuse the memory of the sum, which saves a write."""

from __future__ import annotations

from collections.abc import Mapping

from moaic.ir.graph import Function, Value
from moaic.ir.op_names import ADD_TO


def overwritten(function: Function) -> list[int]:
    """Positions of the parameters whose memory the compiled function may overwrite with results."""
    taken = set(taken_over(function).values())
    return [position for position, param in enumerate(function.params) if param in taken]


def taken_over(function: Function) -> Mapping[Value, Value]:
    """The parameter whose memory a result of `moai.add_to` takes over, by result.

    Legal because no other op reads that parameter, and the caller no longer needs it or passes a copy.
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
