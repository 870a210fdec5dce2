"""Equivalence classes of the values of a main function, such as one value of every layer: each class has one layout.

Two values are equivalent if they are computed by the same expression and read by the same expressions, where a call
counts as its callee and the position alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from moaic.ir.graph import Function, Op, Operand, Value

Keys = Mapping[Value, Hashable]


def equivalence_classes(main: Function) -> dict[Value, Value]:
    """For every value of `main` the first value of its class; the results of one op are classified together."""
    defs, uses = _definition_keys(main), _use_keys(main)
    first: dict[Hashable, tuple[Value, ...]] = {}
    representatives: dict[Value, Value] = {}
    for group in [*((param,) for param in main.params), *_groups(main)]:
        key = tuple((defs[value], uses[value]) for value in group)
        representatives.update(zip(group, first.setdefault(key, group), strict=True))
    return representatives


def _groups(main: Function) -> list[tuple[Value, ...]]:
    """Values that are classified together: the results of an op; those of a call one by one."""
    return [group for op in main.ops for group in ([(r,) for r in op.results] if op.name == "call" else [op.results])]


class _Names:
    """Numbers keys in the order of their first use, so that keys that contain keys stay short."""

    def __init__(self) -> None:
        self.known: dict[Hashable, int] = {}

    def of(self, key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))


def _definition_keys(main: Function) -> dict[Value, int]:
    """A number for the expression of each value. Weights of one type share theirs; other parameters do not."""
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


def _use_keys(main: Function) -> dict[Value, int]:
    """A number for the uses of each value; of a weight, the expression of its gradient counts as one."""
    names = _Names()
    readers: dict[Value, set[Hashable]] = defaultdict(set)
    for index, value in enumerate(main.results):
        readers[value].add(main.result_role(index).kind)
    read: dict[Value, int] = {}
    for op in reversed(main.ops):
        for result in op.results:
            read[result] = names.of(frozenset(readers[result]))
        for position, value in enumerate(op.inputs()):
            readers[value].add(_use_key(op, position, read))
    made = _definition_keys(main)
    labels = {main.param_role(i).label: param for i, param in enumerate(main.params) if main.param_role(i).label}
    for index, value in enumerate(main.results):
        role = main.result_role(index)
        if role.kind == "grad" and role.label in labels:
            readers[labels[role.label]].add(("grad", made[value], read.get(value)))
    read.update((param, names.of(frozenset(readers[param]))) for param in main.params)
    return read


def _use_key(op: Op, position: int, read: Mapping[Value, int]) -> Hashable:
    if op.name == "call":
        return ("call", op.callee, position)
    return (op.name, tuple(sorted(op.attrs.items())), position, tuple(read[result] for result in op.results))
