"""Spell out the layers in whose middle a pipeline is best cut.

A call runs at one stage. Where whole layers do not make even stages, the few calls in which an even border falls become
ops of the main function again, forward and backward, so that the cut can go through them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from moaic.ir.graph import Module, Op, Value
from moaic.ir.ops import Kind, kind_of
from moaic.passes.perf.flops import flops_in
from moaic.passes.pipeline.balanced_partition import least_bound
from moaic.passes.transforms.dce import needed_forward
from moaic.passes.transforms.outline import spelled_out

FLOPS_PER_BYTE = 16.0
"""Arithmetic that takes as long as one byte of memory traffic: only the balance between stages hangs on it."""

UNEVEN = 1.1
"""Stages of whole layers are good enough if the largest costs no more than this many times the mean."""


def opened(module: Module, stages: int) -> Module:
    """`module` with the layers spelled out in which borders between even stages fall."""
    main = module.main
    forward = [main.ops[i] for i in sorted(needed_forward(main))]
    upto = [0.0, *accumulate(cost_of(module, op) for op in forward)]
    share = upto[-1] / stages
    if len(forward) >= stages and least_bound(upto, stages) <= UNEVEN * share:
        return module
    borders = [share * number for number in range(1, stages)]
    straddling = {
        op.loc.module
        for i, op in enumerate(forward)
        if op.name == "call" and any(upto[i] < border < upto[i + 1] for border in borders)
    }
    callees = {function.name: function for function in module.functions[:-1]}
    ops: list[Op] = []
    same: dict[Value, Value] = {}
    for op in main.ops:
        moved = op.with_operands(same)
        if op.name == "call" and op.loc.module in straddling:
            spelled, made = spelled_out(moved, callees[op.callee])
            ops += [_here(each, op) for each in spelled]
            same.update(zip(op.results, made, strict=True))
        else:
            ops.append(moved)
    results = tuple(same.get(value, value) for value in main.results)
    return replace(module, functions=(*callees.values(), replace(main, ops=tuple(ops), results=results)))


def cost_of(module: Module, op: Op) -> float:
    """What an op weighs between stages, in FLOPs."""
    ops = module.function(op.callee).ops if op.name == "call" else (op,)
    light = sum(result.type.nbytes() for each in ops for result in each.results if kind_of(each) is Kind.LIGHT)
    return flops_in(module, op) + FLOPS_PER_BYTE * light


def _here(op: Op, call: Op) -> Op:
    """The op with the layer's number in its module path again, and on the side of the call."""
    path = op.loc.module
    if ".*" in path:
        path = call.loc.module + path.partition(".*")[2]
    return replace(op, loc=replace(op.loc, module=path, side=op.loc.side or call.loc.side))
