"""Inline the layers in which a boundary between balanced pipeline stages falls.

A call runs at one stage. Where whole layers do not balance the stages, the few calls that contain a boundary are
inlined into the main function, forward and backward, so that the boundary can go through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from moaic.ir.graph import Module, Op, Value
from moaic.ir.ops import Kind, kind_of
from moaic.passes.perf.flops import flops_in
from moaic.passes.pipeline.balanced_partition import least_bound
from moaic.passes.transforms.dce import needed_forward
from moaic.passes.transforms.outline import inlined_call

FLOPS_PER_BYTE = 16.0
"""FLOPs that take as long as one byte of memory traffic; only the balance between stages depends on it."""

UNEVEN = 1.1
"""Stages of whole layers are kept if the largest costs no more than this many times its share."""


def with_layers_inlined(module: Module, shares: Sequence[int]) -> Module:
    """`module` with the layers inlined in which boundaries fall between stages that have these shares of it."""
    main = module.main
    forward = [main.ops[i] for i in sorted(needed_forward(main))]
    prefix_sums = [0.0, *accumulate(cost_of(module, op) for op in forward)]
    share = prefix_sums[-1] / sum(shares)
    if len(forward) >= len(shares) and least_bound(prefix_sums, shares) <= UNEVEN * share:
        return module
    boundaries = [share * sum(shares[:number]) for number in range(1, len(shares))]
    straddling = {
        op.loc.module
        for i, op in enumerate(forward)
        if op.name == "call" and any(prefix_sums[i] < boundary < prefix_sums[i + 1] for boundary in boundaries)
    }
    callees = {function.name: function for function in module.functions[:-1]}
    ops: list[Op] = []
    mapping: dict[Value, Value] = {}
    for op in main.ops:
        moved = op.with_operands(mapping)
        if op.name == "call" and op.loc.module in straddling:
            inlined, results = inlined_call(moved, callees[op.callee])
            ops += [_in_layer(inner, op) for inner in inlined]
            mapping.update(zip(op.results, results, strict=True))
        else:
            ops.append(moved)
    main_results = tuple(mapping.get(value, value) for value in main.results)
    return replace(module, functions=(*callees.values(), replace(main, ops=tuple(ops), results=main_results)))


def cost_of(module: Module, op: Op) -> float:
    """The cost of an op in the balance between stages, in FLOPs; a call has that of all calls that it stands for."""
    ops = module.function(op.callee).ops if op.name == "call" else (op,)
    light = sum(result.type.nbytes() for inner in ops for result in inner.results if kind_of(inner) is Kind.LIGHT)
    return flops_in(module, op) + FLOPS_PER_BYTE * op.times * light


def _in_layer(op: Op, call: Op) -> Op:
    """The op with the layer's number in its module path again, and the side of the call."""
    path = op.loc.module
    if ".*" in path:
        path = call.loc.module + path.partition(".*")[2]
    return replace(op, loc=replace(op.loc, module=path, side=op.loc.side or call.loc.side))
