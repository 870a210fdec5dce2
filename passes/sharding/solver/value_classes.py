"""Values of a main function that play the same part in every layer: one decision serves them all.

Two values are twins if they are made alike and read alike, where a call is known by its callee and position alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from moaic.ir.graph import Function, Op, Operand, Value

Keys = Mapping[Value, Hashable]


def twins(main: Function) -> dict[Value, Value]:
    """For every value of `main` its representative, the first of its twins; results of one op stay together."""
    made, read = _made(main), _read(main)
    first: dict[Hashable, tuple[Value, ...]] = {}
    found: dict[Value, Value] = {}
    for group in [*((param,) for param in main.params), *_groups(main)]:
        key = tuple((made[value], read[value]) for value in group)
        found.update(zip(group, first.setdefault(key, group), strict=True))
    return found


def _groups(main: Function) -> list[tuple[Value, ...]]:
    """Values about which one decision is made: an op's results together, those of a call each alone."""
    return [group for op in main.ops for group in ([(r,) for r in op.results] if op.name == "call" else [op.results])]


class _Names:
    """Small numbers for keys, so that nested keys stay short."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))


def _made(main: Function) -> dict[Value, int]:
    """How each value is made. Weights of one type are alike as far as this goes; other parameters are not."""
    names = _Names()
    made: dict[Value, int] = {}
    for index, param in enumerate(main.params):
        kind = main.param_role(index).kind
        made[param] = names.of(("param", kind, param.type, -1 if kind == "param" else index))
    for op in main.ops:
        for index, result in enumerate(op.results):
            if op.name == "call":
                made[result] = names.of(("call", op.callee, index))
            else:
                operands = tuple(_operand_key(operand, made) for operand in op.operands)
                made[result] = names.of((op.name, tuple(sorted(op.attrs.items())), result.type, index, operands))
    return made


def _operand_key(operand: Operand, made: Mapping[Value, int]) -> Hashable:
    if isinstance(operand, tuple):
        return tuple(None if value is None else made[value] for value in operand)
    return None if operand is None else made[operand]


def _read(main: Function) -> dict[Value, int]:
    """How each value is read, and for a weight also how its gradient is made."""
    names = _Names()
    readers: dict[Value, set[Hashable]] = defaultdict(set)
    for index, value in enumerate(main.results):
        readers[value].add(main.result_role(index).kind)
    read: dict[Value, int] = {}
    for op in reversed(main.ops):
        for result in op.results:
            read[result] = names.of(frozenset(readers[result]))
        for position, value in enumerate(op.inputs()):
            readers[value].add(_reading(op, position, read))
    made = _made(main)
    labels = {main.param_role(i).label: param for i, param in enumerate(main.params) if main.param_role(i).label}
    for index, value in enumerate(main.results):
        role = main.result_role(index)
        if role.kind == "grad" and role.label in labels:
            readers[labels[role.label]].add(("grad", made[value], read.get(value)))
    read.update((param, names.of(frozenset(readers[param]))) for param in main.params)
    return read


def _reading(op: Op, position: int, read: Mapping[Value, int]) -> Hashable:
    if op.name == "call":
        return ("call", op.callee, position)
    return (op.name, tuple(sorted(op.attrs.items())), position, tuple(read[result] for result in op.results))
