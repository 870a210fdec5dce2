"""FLOPs of an op and of a function, the functions that they call included."""

from __future__ import annotations

from moaic.ir.graph import Function, Module, Op
from moaic.ir.ops import flops_of


def flops_in(module: Module, op: Op) -> int:
    """FLOPs of one execution of `op`; a call counts those of its callee."""
    if op.name != "call":
        return flops_of(op)
    return op.times * function_flops(module, module.function(op.callee))


def function_flops(module: Module, function: Function) -> int:
    """FLOPs of one execution of `function`."""
    return sum(flops_in(module, op) for op in function.ops)
