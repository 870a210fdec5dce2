"""Outline repeated layers: ops of `layers.0`, `layers.1`, … that are isomorphic become one function and calls to it.

Legal because a group of ops may be moved into a call whenever no path leaves the group and comes back (checked), and
because two groups get one function only if they are equal up to the names of their values (structural key).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.graph import Function, Location, Module, Op, Operand, Value
from moaic.ir.topological_sort import sort_ops

_Place = tuple[str, int, str]
"""A container of layers, the number of one of them, and a side of it."""

_KEPT = frozenset({"param", "buffer"})
"""Roles of what layers have themselves."""

_LAYER = re.compile(r"^(?P<container>(?:[^.]+\.)*?[^.\d][^.]*)\.(?P<index>\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True)
class Region:
    """The ops of one layer on one side of the step, by position in the function."""

    container: str
    index: int
    side: str
    ops: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A group of ops up to names: what isomorphic groups share, the values taken from outside and those made."""

    key: Hashable
    inputs: tuple[Value, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Outline:
    name: ClassVar[str] = "outline"
    summary: ClassVar[str] = "turn repeated layers into calls of one function"

    def apply(self, module: Module) -> Module:
        return outline(module)


def outline(module: Module) -> Module:
    """`module` with every repeated layer of its main function outlined into a function."""
    main = module.main
    groups = [group for group in _isomorphic(main, regions(main)) if _convex(main, [region for region, _ in group])]
    while groups:
        outlined = _with_calls(module, groups)
        if outlined is not None:
            return outlined
        groups.pop()
    return module


def _with_calls(module: Module, groups: Sequence[Sequence[tuple[Region, LayerShape]]]) -> Module | None:
    """`module` with these groups called; None where two of the calls would depend on each other."""
    main = module.main
    outside = _used_outside(main, groups)
    functions: list[Function] = []
    calls: dict[int, Op] = {}
    for group, name in zip(groups, _names(groups, [each.name for each in module.functions]), strict=True):
        kept = [
            any(shape.values[i] in outside[region] for region, shape in group) for i in range(len(group[0][1].values))
        ]
        functions.append(_function(main, name, *group[0], kept))
        for region, shape in group:
            calls[region.ops[0]] = _call(main, name, region, shape, kept)
    inside = {i for group in groups for region, _ in group for i in region.ops}
    loose = {i: op for i, op in enumerate(main.ops) if i not in inside}
    ops = sort_ops({**loose, **calls})
    if ops is None:
        return None
    return Module((*module.functions[:-1], *functions, replace(main, ops=ops)), module.mesh)


def layer_of(path: str) -> tuple[str, int] | None:
    """Container and number of the layer that a module path is in; None outside layers."""
    match = _LAYER.match(path)
    return None if match is None else (match["container"], int(match["index"]))


def regions(function: Function) -> list[Region]:
    """Ops by layer and side. Ops without a module path go with the latest op that they read, or with their readers.

    What an op reads that reads nothing itself, such as a constant, does not count.
    """
    keys: list[_Place | None] = []
    made_by = {result: i for i, op in enumerate(function.ops) for result in op.results}
    reads = [[made_by[value] for value in op.inputs() if value in made_by] for op in function.ops]
    for op, read in zip(function.ops, reads, strict=True):
        place = layer_of(op.loc.module)
        key: _Place | None = None
        if place is not None:
            key = (*place, op.loc.side)
        elif not op.loc.module and read:
            key = keys[max((i for i in read if reads[i]), default=max(read))]
            key = None if key is not None and key[2] != op.loc.side else key
        keys.append(key)
    _go_with_readers(function, keys, reads)
    members: dict[_Place, list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        if key is not None:
            members[key].append(i)
    return [Region(*key, tuple(ops)) for key, ops in members.items()]


def _go_with_readers(function: Function, keys: list[_Place | None], reads: Sequence[Sequence[int]]) -> None:
    """Places ops without a module path that are made of values of one layer at most, and read on one side of it alone.

    In the backward of `x /= y`, which has lost its path, `x / y` is made anew from values of the layer's forward.
    """
    unplaced = [key is None and not op.loc.module for key, op in zip(keys, function.ops, strict=True)]
    others = {value for i, value in enumerate(function.params) if function.param_role(i).kind not in _KEPT}
    sources: list[set[tuple[str, int] | None]] = []
    readers: dict[int, set[_Place | None]] = defaultdict(set)
    for i, op in enumerate(function.ops):
        of_op: set[tuple[str, int] | None] = (
            set() if others.isdisjoint(op.inputs()) and (reads[i] or not any(op.inputs())) else {None}
        )
        for read in reads[i]:
            key = keys[read]
            of_op |= sources[read] if unplaced[read] else {None if key is None else key[:2]}
        sources.append(of_op)
    results = {*function.results}
    for i in reversed(range(len(keys))):
        op = function.ops[i]
        if unplaced[i] and len(readers[i]) == 1 and results.isdisjoint(op.results):
            (key,) = readers[i]
            keys[i] = key if key is not None and sources[i] <= {key[:2]} and key[2] == op.loc.side else None
        for read in reads[i]:
            readers[read].add(keys[i])


def _isomorphic(function: Function, layers: Sequence[Region]) -> list[list[tuple[Region, LayerShape]]]:
    classes: dict[Hashable, list[tuple[Region, LayerShape]]] = defaultdict(list)
    for region in layers:
        shape = shape_of(function, region.ops)
        classes[region.container, region.side, shape.key].append((region, shape))
    return [group for group in classes.values() if len(group) > 1]


def shape_of(function: Function, indices: Sequence[int]) -> LayerShape:
    """The ops at `indices` up to names."""
    numbers: dict[Value, Hashable] = {}
    inputs: list[Value] = []
    values: list[Value] = []

    def number(value: Value | None) -> Hashable:
        if value is None:
            return None
        if value not in numbers:
            numbers[value] = ("in", len(inputs), value.type.anywhere())
            inputs.append(value)
        return numbers[value]

    def operand_key(operand: Operand) -> Hashable:
        return tuple(map(number, operand)) if isinstance(operand, tuple) else number(operand)

    key: list[Hashable] = []
    for i in indices:
        op = function.ops[i]
        operands = tuple(operand_key(operand) for operand in op.operands)
        key.append((op.name, operands, tuple(sorted(op.attrs.items())), tuple(r.type.anywhere() for r in op.results)))
        for result in op.results:
            numbers[result] = len(values)
            values.append(result)
    return LayerShape(tuple(key), tuple(inputs), tuple(values))


def _used_outside(
    function: Function, groups: Sequence[Sequence[tuple[Region, LayerShape]]]
) -> dict[Region, set[Value]]:
    owner = {i: region for group in groups for region, _ in group for i in region.ops}
    made_in = {result: owner[i] for i in owner for result in function.ops[i].results}
    outside: dict[Region, set[Value]] = defaultdict(set)
    for i, op in enumerate(function.ops):
        for value in op.inputs():
            if value in made_in and made_in[value] != owner.get(i):
                outside[made_in[value]].add(value)
    for value in function.results:
        if value in made_in:
            outside[made_in[value]].add(value)
    return outside


def _names(groups: Sequence[Sequence[tuple[Region, LayerShape]]], taken: Sequence[str]) -> list[str]:
    """A name for the function of each group, by its container; numbered where there are several."""
    names = list(taken)
    for group in groups:
        region = group[0][0]
        name = f"{region.container.split('.')[-1]}.{'bwd' if region.side == 'backward' else 'fwd'}"
        count = sum(n == name or n.startswith(name + ".") for n in names)
        names.append(f"{name}.{count + 1}" if count else name)
    return names[len(taken) :]


def _function(main: Function, name: str, region: Region, shape: LayerShape, kept: Sequence[bool]) -> Function:
    """The region's ops with the layer's own number taken out of their module paths."""
    params = tuple(Value(value.type, value.name) for value in shape.inputs)
    ops = [
        _relocated(main.ops[i].with_operands(dict(zip(shape.inputs, params, strict=True))), region) for i in region.ops
    ]
    results = tuple(value for value, keep in zip(shape.values, kept, strict=True) if keep)
    return fresh(Function(name, params, tuple(ops), results))


def _relocated(op: Op, region: Region) -> Op:
    prefix = f"{region.container}.{region.index}"
    module = region.container + ".*" + op.loc.module.removeprefix(prefix) if op.loc.module else ""
    return replace(op, loc=replace(op.loc, module=module))


def inlined_call(call: Op, callee: Function) -> tuple[list[Op], list[Value]]:
    """The callee's ops at the call, and the values of its results: the inverse of outlining."""
    mapping: dict[Value, Value] = dict(zip(callee.params, call.inputs(), strict=True))
    owner = call.results[0].type.layout.owner
    ops: list[Op] = []
    for op in callee.ops:
        results = tuple(Value(result.type.at(owner), result.name) for result in op.results)
        ops.append(replace(op.with_operands(mapping), results=results))
        mapping.update(zip(op.results, results, strict=True))
    return ops, [mapping[value] for value in callee.results]


def fresh(function: Function) -> Function:
    """A copy of `function` with new values, whose types name no owner."""
    mapping = {value: Value(value.type.anywhere(), value.name) for value in function.values()}
    ops = tuple(
        replace(op.with_operands(mapping), results=tuple(mapping[result] for result in op.results))
        for op in function.ops
    )
    params = tuple(mapping[value] for value in function.params)
    return replace(function, params=params, ops=ops, results=tuple(mapping[value] for value in function.results))


def _call(main: Function, name: str, region: Region, shape: LayerShape, kept: Sequence[bool]) -> Op:
    results = tuple(value for value, keep in zip(shape.values, kept, strict=True) if keep)
    loc = Location(module=f"{region.container}.{region.index}", side=region.side)
    return Op("call", shape.inputs, results, {"callee": name}, loc)


def _convex(function: Function, group: Sequence[Region]) -> bool:
    """Whether each region can become one op: no path leaves it and comes back."""
    return all(_region_convex(function, region) for region in group)


def _region_convex(function: Function, region: Region) -> bool:
    inside = set(region.ops)
    made = {result for i in inside for result in function.ops[i].results}
    tainted: set[Value] = set()
    for i in range(region.ops[0], region.ops[-1] + 1):
        op = function.ops[i]
        if i in inside:
            if any(value in tainted for value in op.inputs()):
                return False
        elif any(value in tainted or value in made for value in op.inputs()):
            tainted.update(op.results)
    return True
