"""Split the backward of repeated layers into gradients of inputs and gradients of parameters, as zero-bubble needs.

    %dx, %dw = call @layers.bwd %x, %w, %dy : f32[8{mb}, 64], f32[64, 64] +mb
    %g = moai.all_reduce %dw {axis = "mb"} : f32[64, 64]
becomes (%e is a value inside the function that both halves read)
    %dx, %e = call @layers.bwd.inputs %x, %w, %dy : f32[8{mb}, 64], f32[8{mb}, 64]
    %dw = call @layers.bwd.weights %x, %e : f32[64, 64] +mb

A lower layer waits for the first half alone, and the schedule may delay the second, which is only summed over
micro-batches. Legal because both halves compute the ops of the one function on the same values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.ops import Kind, kind_of
from moaic.passes.loop_axes import combines_parts
from moaic.passes.transforms.outline import fresh


@dataclass(frozen=True, slots=True)
class SplitBackward:
    name: ClassVar[str] = "weights"
    summary: ClassVar[str] = "split the gradients of parameters off each layer's backward"

    def apply(self, module: Module) -> Module:
        return split_weights(module)


def split_weights(module: Module) -> Module:
    """`module` with every function of the backward split in two, where both halves then have heavy ops."""
    halves: dict[str, tuple[Function, Function]] = {}
    for function in module.functions[:-1]:
        if (split := _split(function, _only_summed(module.main, function))) is not None:
            halves[function.name] = split
    functions = [fresh(half) for f in module.functions[:-1] for half in halves.get(f.name, (f,))]
    ops = [call for op in module.main.ops for call in _calls(op, module, halves)]
    return Module((*functions, replace(module.main, ops=tuple(ops))), module.mesh)


def _only_summed(main: Function, function: Function) -> list[int]:
    """Positions of the results that every call in the backward only passes to sums over micro-batches."""
    readers: dict[Value, list[Op]] = defaultdict(list)
    for op in main.ops:
        for value in op.inputs():
            readers[value].append(op)
    calls = [op for op in main.ops if op.name == "call" and op.callee == function.name and op.loc.side == "backward"]
    returned = set(main.results)

    def summed(value: Value) -> bool:
        return value not in returned and bool(readers[value]) and all(combines_parts(op) for op in readers[value])

    return [i for i in range(len(function.results)) if calls and all(summed(call.results[i]) for call in calls)]


def _split(function: Function, summed: Sequence[int]) -> tuple[Function, Function] | None:
    """The half for inputs, which also returns values that the other half reads, and the half for weights.

    None where no input waits for the first half, or the second has no heavy op.
    """
    for_inputs = [value for i, value in enumerate(function.results) if i not in summed]
    first = backward_slice(function, for_inputs)
    # One op may make a gradient of a parameter together with what another layer waits for.
    early = {result for i in first for result in function.ops[i].results}
    late = [i for i in summed if function.results[i] not in early]
    second = _with_views(function, backward_slice(function, [function.results[i] for i in late]) - first)
    if not for_inputs or not any(kind_of(function.ops[i]) is Kind.HEAVY for i in second - first):
        return None
    at_once = [value for i, value in enumerate(function.results) if i not in late]
    own = {result for i in second for result in function.ops[i].results}
    read = dict.fromkeys(value for i in sorted(second) for value in function.ops[i].inputs() if value not in own)
    passed = [value for value in read if value not in function.params]
    results = [function.results[i] for i in late]
    return (
        _part(
            function,
            "inputs",
            sorted(first),
            function.params,
            [*at_once, *(value for value in passed if value not in at_once)],
        ),
        _part(function, "weights", sorted(second), tuple(read), results),
    )


def _with_views(function: Function, indices: set[int]) -> set[int]:
    """These ops and the views and constants that they read, which the second half rebuilds instead of receiving them.

        %wt = aten.permute %w {dims = [1, 0]} : f32[64, 64]     # read by both halves
        %dx = aten.mm %e, %wt : f32[8, 64]
    then %wt is in both halves, and %w is passed to both: rebuilding a view costs nothing, keeping one more value does.
    """
    producer = {result: i for i, op in enumerate(function.ops) for result in op.results}
    extended, waiting = set(indices), list(indices)
    while waiting:
        for value in function.ops[waiting.pop()].inputs():
            source = producer.get(value)
            movable = source is not None and kind_of(function.ops[source]) in (Kind.VIEW, Kind.NULLARY)
            if source is not None and movable and source not in extended:
                extended.add(source)
                waiting.append(source)
    return extended


def _part(
    function: Function, name: str, indices: Sequence[int], params: Sequence[Value], results: Sequence[Value]
) -> Function:
    ops = tuple(function.ops[i] for i in indices)
    return Function(f"{function.name}.{name}", tuple(params), ops, tuple(results))


def _calls(op: Op, module: Module, halves: dict[str, tuple[Function, Function]]) -> list[Op]:
    if op.name != "call" or op.callee not in halves:
        return [op]
    whole, (first, second) = module.function(op.callee), halves[op.callee]
    outside = dict(zip(whole.params, op.inputs(), strict=True)) | dict(zip(whole.results, op.results, strict=True))
    for value in first.results:
        outside.setdefault(value, Value(value.type, value.name))
    return [
        replace(
            op,
            operands=tuple(outside[value] for value in half.params),
            results=tuple(outside[value] for value in half.results),
            attrs={**op.attrs, "callee": half.name},
        )
        for half in (first, second)
    ]
