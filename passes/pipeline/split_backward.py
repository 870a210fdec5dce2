"""Split gradients of parameters off the backward of repeated layers, so that a schedule may put them off.

A layer's backward becomes two functions: one that makes what lower layers wait for, one that makes what is only summed
over micro-batches. Legal because both compute what the one did, from the same values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.ops import Kind, kind_of
from moaic.passes.loop_axes import finishes
from moaic.passes.transforms.outline import fresh


@dataclass(frozen=True, slots=True)
class SplitBackward:
    name: ClassVar[str] = "weights"
    summary: ClassVar[str] = "split gradients of parameters off each layer's backward"

    def apply(self, module: Module) -> Module:
        return split_weights(module)


def split_weights(module: Module) -> Module:
    """`module` with every function called in the backward cut in two, where that takes heavy work apart."""
    halves: dict[str, tuple[Function, Function]] = {}
    for function in module.functions[:-1]:
        if (found := _split(function, _only_summed(module.main, function))) is not None:
            halves[function.name] = found
    functions = [fresh(each) for f in module.functions[:-1] for each in halves.get(f.name, (f,))]
    ops = [each for op in module.main.ops for each in _calls(op, module, halves)]
    return Module((*functions, replace(module.main, ops=tuple(ops))), module.mesh)


def _only_summed(main: Function, function: Function) -> list[int]:
    """Positions of the results that every call of a backward only sums over micro-batches."""
    readers: dict[Value, list[Op]] = defaultdict(list)
    for op in main.ops:
        for value in op.inputs():
            readers[value].append(op)
    calls = [op for op in main.ops if op.name == "call" and op.callee == function.name and op.loc.side == "backward"]
    returned = set(main.results)

    def summed(value: Value) -> bool:
        return value not in returned and bool(readers[value]) and all(finishes(op) for op in readers[value])

    return [i for i in range(len(function.results)) if calls and all(summed(call.results[i]) for call in calls)]


def _split(function: Function, summed: Sequence[int]) -> tuple[Function, Function] | None:
    """The half that the rest waits for, which also returns what the other needs of it, and that other half."""
    flowing = [value for i, value in enumerate(function.results) if i not in summed]
    first = backward_slice(function, flowing)
    second = _with_views(function, backward_slice(function, [function.results[i] for i in summed]) - first)
    if not flowing or not any(kind_of(function.ops[i]) is Kind.HEAVY for i in second - first):
        return None
    made = {result for i in second for result in function.ops[i].results}
    read = dict.fromkeys(value for i in sorted(second) for value in function.ops[i].inputs() if value not in made)
    passed = [value for value in read if value not in function.params]
    results = [function.results[i] for i in summed]
    return (
        _part(function, "inputs", sorted(first), function.params, [*flowing, *passed]),
        _part(function, "weights", sorted(second), tuple(read), results),
    )


def _with_views(function: Function, indices: set[int]) -> set[int]:
    """These ops, and what of views and constants they read: to be made again rather than passed on."""
    producer = {result: i for i, op in enumerate(function.ops) for result in op.results}
    found, waiting = set(indices), list(indices)
    while waiting:
        for value in function.ops[waiting.pop()].inputs():
            source = producer.get(value)
            movable = source is not None and kind_of(function.ops[source]) in (Kind.VIEW, Kind.NULLARY)
            if source is not None and movable and source not in found:
                found.add(source)
                waiting.append(source)
    return found


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
            attrs={"callee": half.name},
        )
        for half in (first, second)
    ]
