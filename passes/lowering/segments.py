"""Cut a function into segments at its instructions: the ops between them become functions, to be compiled and called.

Ops of one phase are in one segment unless an instruction separates them: the level of an op is the largest number of
instructions on a path to it, and one (phase, level, owner) is one segment. An op that only a later segment reads may
sink into it (`sink`). Every segment rebuilds the views and constants that it reads. Equal segments share one function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from moaic.ir.graph import Function, Location, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.ops import Kind, kind_of
from moaic.ir.topological_sort import sort_ops
from moaic.passes.lowering.grad_accumulation import AccumulatingFunctions
from moaic.passes.lowering.sink import SinkKey, sunk
from moaic.passes.transforms.outline import fresh, shape_of


@dataclass(slots=True)
class Segments:
    """The segment functions of a module, by what they compute."""

    others: frozenset[str] = frozenset()
    """Names of other functions of the module."""
    by_key: dict[Hashable, Function] = field(default_factory=dict[Hashable, Function])
    accumulating: AccumulatingFunctions = field(default_factory=AccumulatingFunctions)
    """Their variants that accumulate gradients, made when a program needs them."""

    def name_for(self, stem: str) -> str:
        taken = self.others | {function.name for function in self.by_key.values()}
        return next(name for i in range(len(taken) + 1) if (name := f"{stem}.{i}") not in taken)

    @property
    def functions(self) -> tuple[Function, ...]:
        return tuple(self.by_key.values())


P = TypeVar("P", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Segmented(Generic[P]):
    """A function of calls and instructions alone, and the phase of each of its ops."""

    function: Function
    phases: tuple[P, ...]


def segment(function: Function, mesh: Mesh, phases: Sequence[P], segments: Segments) -> Segmented[P]:
    """`function` as calls of segments and instructions alone; new segment functions are added to `segments`."""
    early = _keys(function, phases)
    keys = sunk(function, early, mesh)
    members = _members(function, keys)
    calls: dict[int, Op] = {i: op for i, op in enumerate(function.ops) if kind_of(op) is Kind.INSTRUCTION}
    phase_of = {op: phases[i] for i, op in calls.items()}
    used = _used(function, members)
    for key in (key for key in dict.fromkeys(early) if key in members):
        indices = members[key]
        own = [i for i in indices if keys[i] == key]
        call = _call(function, indices, {result for i in own for result in function.ops[i].results}, used, segments)
        if call is not None:
            calls[next(i for i in own if early[i] == key)] = call
            phase_of[call] = phases[own[0]]
    ops = sort_ops(calls)
    assert ops is not None, f"segments of @{function.name} wait for each other"
    return Segmented(replace(function, ops=ops), tuple(phase_of[op] for op in ops))


def _keys(function: Function, phases: Sequence[Hashable]) -> list[SinkKey]:
    """(phase, level, owner) of every op."""
    levels: dict[Value, int] = {}
    keys: list[SinkKey] = []
    for op, phase in zip(function.ops, phases, strict=True):
        level = max((levels[value] for value in op.inputs() if value in levels), default=0)
        after = level + 1 if kind_of(op) is Kind.INSTRUCTION else level
        keys.append((phase, level, op.results[0].type.layout.owner))
        levels.update(dict.fromkeys(op.results, after))
    return keys


def _members(function: Function, keys: Sequence[SinkKey]) -> dict[SinkKey, list[int]]:
    """Positions of the ops of each segment in order, with the views and constants that it reads; dead ones left out."""
    producer = {result: i for i, op in enumerate(function.ops) for result in op.results}
    movable = [kind_of(op) in (Kind.VIEW, Kind.NULLARY) for op in function.ops]
    needed: dict[SinkKey, set[int]] = defaultdict(set)

    def include(index: int, key: SinkKey) -> None:
        waiting = [index]
        while waiting:
            current = waiting.pop()
            if current in needed[key]:
                continue
            needed[key].add(current)
            sources = {producer[value] for value in function.ops[current].inputs() if value in producer}
            waiting += [source for source in sources if movable[source]]

    for index, op in enumerate(function.ops):
        if kind_of(op) is Kind.INSTRUCTION:
            for value in op.inputs():
                if value in producer and movable[producer[value]]:
                    include(producer[value], keys[producer[value]])
        elif not movable[index]:
            include(index, keys[index])
    for value in function.results:
        if value in producer and kind_of(function.ops[producer[value]]) is not Kind.INSTRUCTION:
            include(producer[value], keys[producer[value]])
    return {key: sorted(indices) for key, indices in needed.items()}


def _used(function: Function, members: dict[SinkKey, list[int]]) -> dict[Value, set[int]]:
    """For every value the numbers of the segments that read it; -1 for the function's results, -2 for instructions."""
    used: dict[Value, set[int]] = defaultdict(set)
    for value in function.results:
        used[value].add(-1)
    for op in function.ops:
        if kind_of(op) is Kind.INSTRUCTION:
            for value in op.inputs():
                used[value].add(-2)
    for segment_id, indices in enumerate(members.values()):
        made = {result for i in indices for result in function.ops[i].results}
        for i in indices:
            for value in function.ops[i].inputs():
                if value not in made:
                    used[value].add(segment_id)
    return used


def _call(
    function: Function, indices: Sequence[int], own: set[Value], used: dict[Value, set[int]], segments: Segments
) -> Op | None:
    shape = shape_of(function, indices)
    movable = {
        result
        for i in indices
        if kind_of(function.ops[i]) in (Kind.VIEW, Kind.NULLARY)
        for result in function.ops[i].results
    }
    results = [v for v in shape.values if v in own and used[v] and (v not in movable or used[v] & {-1, -2})]
    if not results:
        return None
    key = (shape.key, tuple(shape.values.index(value) for value in results))
    if key not in segments.by_key:
        segments.by_key[key] = _function(function, segments.name_for(function.name), indices, shape.inputs, results)
    return Op("call", shape.inputs, tuple(results), {"callee": segments.by_key[key].name}, _location(function, indices))


def _function(
    function: Function, name: str, indices: Sequence[int], inputs: Sequence[Value], results: Sequence[Value]
) -> Function:
    ops = tuple(function.ops[i] for i in indices)
    return fresh(Function(name, tuple(inputs), ops, tuple(results)))


def _location(function: Function, indices: Sequence[int]) -> Location:
    sides = {function.ops[i].loc.side for i in indices} - {""}
    return Location(side=sides.pop() if len(sides) == 1 else "")
