"""Deeper copies of a step: the same step with more equal layers, as if all of them had been captured.

The inverse of `shallow`, on a step as it was captured. The second unit of a stack is copied, and the copies stand
between it and the third one. Each copy reads what the unit reads: its own parameters, values of the copy below it or,
in the backward, of the copy above it, and whatever all units read:

    %h1 = aten.mul.Tensor %h0, %w0 in "layers.0"
    %h2 = aten.mul.Tensor %h1, %w1 in "layers.1"
    %h3 = aten.mul.Tensor %h2, %w2 in "layers.2"
becomes, deeper by one layer,
    %h1 = aten.mul.Tensor %h0, %w0 in "layers.0"
    %h2 = aten.mul.Tensor %h1, %w1 in "layers.1"
    %c2 = aten.mul.Tensor %h2, %c1 in "layers.2"
    %h3 = aten.mul.Tensor %c2, %w2 in "layers.3"
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from moaic.ir.graph import Module, Op, Role, Value
from moaic.ir.op_names import FOLD_KEY
from moaic.ir.topological_sort import sort_ops
from moaic.passes.transforms.outline import layer_of, outline, regions
from moaic.passes.transforms.shallow import Stack, stacks_of

BACKWARD = "backward"

COPIED = 1
"""The unit of a stack that is copied: the lowest one that may read a unit below it and one above it."""

UNITS = 3
"""Units of a stack that show what more of them would do."""


def deepened(module: Module, container: str, layers: int) -> Module | None:
    """A captured step with so many more layers in a container; None where it does not show what they would do.

    It shows that where at least three units of a stack are equal, and read each other in the same way.
    """
    stack = next((each for each in stacks_of(outline(module).main) if each.container == container), None)
    if stack is None:
        return None
    for layers_in_unit in range(stack.period, stack.period * stack.units // UNITS + 1, stack.period):
        if layers % layers_in_unit == 0:
            units = replace(stack, period=layers_in_unit, units=stack.period * stack.units // layers_in_unit)
            if (deeper := _Insertion(module, units, layers // layers_in_unit).run()) is not None:
                return deeper
    return None


class _InUnit(NamedTuple):
    """Where a value of a stack is made: the unit, and within it the layer, its side, the op there, and the result."""

    unit: int
    layer: int
    side: str
    op: int
    result: int


class _IrregularError(Exception):
    """Units differ in what they do or read, or something else reads all of them."""


class _Insertion:
    """The insertion of so many copies of a unit into the main function of a module."""

    def __init__(self, module: Module, stack: Stack, copies: int) -> None:
        self.module = module
        self.main = module.main
        self.stack = stack
        self.copies = copies
        self.units: dict[Op, int] = {}
        """By op of the stack, its unit."""
        self.ops: dict[_InUnit, Op] = {}
        """By place of its first result."""
        self.made: dict[Value, _InUnit] = {}
        self.at: dict[_InUnit, Value] = {}
        self._place()
        self.keys = {result: op for op in self.main.ops if op.name == FOLD_KEY for result in op.results}
        """By random key, the op that makes it: no unit has it, but every reader has its own."""
        self.owned = self._owned()
        """The parameters of a unit, by unit and by their names in the lowest one."""
        self.owners = {value: key for key, value in self.owned.items()}
        self.renamed = self._renamed()
        self.new = self._new()

    def _place(self) -> None:
        for region in regions(self.main):
            if (unit := self._unit(f"{region.container}.{region.index}")) is None:
                continue
            layer = region.index - self.stack.first - unit * self.stack.period
            for number, position in enumerate(region.ops):
                op = self.main.ops[position]
                self.units[op] = unit
                self.ops[_InUnit(unit, layer, region.side, number, 0)] = op
                for index, result in enumerate(op.results):
                    self.made[result] = place = _InUnit(unit, layer, region.side, number, index)
                    self.at[place] = result

    def _owned(self) -> dict[tuple[int, str], Value]:
        found: dict[tuple[int, str], Value] = {}
        for i, param in enumerate(self.main.params):
            label = self.main.param_role(i).label
            if (unit := self._unit(label)) is not None:
                found[unit, self._raised(label, -unit)] = param
        return found

    def _renamed(self) -> dict[Value, Value]:
        """By parameter of a layer above the copies, the same under its new name."""
        moved = ((param, self._moved(param.name)) for param in self.main.params)
        return {param: Value(param.type, name) for param, name in moved if name != param.name}

    def _new(self) -> dict[tuple[Value, int], Value]:
        """By value of the copied unit and number of a copy, what the copy has in its place."""
        copied = [op for op, unit in self.units.items() if unit == COPIED]
        made = [result for op in copied for result in op.results]
        keys = [value for op in copied for value in op.inputs() if value in self.keys]
        owned = [param for (unit, _), param in self.owned.items() if unit == COPIED]
        return {
            (value, copy): Value(value.type, self._raised(value.name, copy))
            for value in (*made, *keys, *owned)
            for copy in self._copies
        }

    @property
    def _copies(self) -> range:
        return range(1, self.copies + 1)

    def _unit(self, path: str) -> int | None:
        """The unit that a module path or the name of a parameter is in."""
        place = layer_of(path)
        if place is None or not self.stack.has(*place):
            return None
        return (place[1] - self.stack.first) // self.stack.period

    def _raised(self, path: str, units: int) -> str:
        """A module path or the name of a parameter in the layer so many units above its own."""
        place = layer_of(path)
        if place is None or place[0] != self.stack.container:
            return path
        container, number = place
        return f"{container}.{number + units * self.stack.period}{path.removeprefix(f'{container}.{number}')}"

    def _moved(self, path: str) -> str:
        """A path with the number that its layer has when the copies are there."""
        place = layer_of(path)
        above = self.stack.first + (COPIED + 1) * self.stack.period
        is_above = place is not None and place[0] == self.stack.container and place[1] >= above
        return self._raised(path, self.copies) if is_above else path

    def run(self) -> Module | None:
        try:
            self._check()
            ops = sort_ops(dict(enumerate(self._ops())))
            params = self._with_copies(
                self.main.params, [self.main.param_role(i) for i in range(len(self.main.params))]
            )
            results = self._with_copies(
                self.main.results, [self.main.result_role(i) for i in range(len(self.main.results))]
            )
        except _IrregularError:
            return None
        if ops is None:
            return None
        main = replace(
            self.main,
            params=tuple(param for param, _ in params),
            param_roles=tuple(role for _, role in params),
            ops=_with_keys_in_order(ops),
            results=tuple(result for result, _ in results),
            result_roles=tuple(role for _, role in results),
        )
        return replace(self.module, functions=(*self.module.functions[:-1], main))

    def _check(self) -> None:
        """Raises unless every unit is to the ones next to it as a copy will be to the ones next to it."""
        if [op.attrs["instance"] for op in self.keys.values()] != [*range(len(self.keys))]:
            raise _IrregularError
        for place, op in self.ops.items():
            if not self._is_amid(place):
                continue
            below, above = (self.ops.get(place._replace(unit=place.unit + step)) for step in (-1, 1))
            if below is None or above is None or not _form(below) == _form(op) == _form(above):
                raise _IrregularError
            for reads in zip(below.inputs(), op.inputs(), above.inputs(), strict=True):
                if not self._are_alike(place.unit, *reads):
                    raise _IrregularError

    def _are_alike(self, unit: int, below: Value, read: Value, above: Value) -> bool:
        """Whether the same op of three units reads alike; the lowest or the highest reads what no other does."""
        if read in self.made and self.made[read].unit > unit:
            return self._one_above(below) == read
        return self._one_above(read) == self._itself(above)

    def _one_above(self, value: Value) -> Value | str | None:
        """What the next unit has in place of a value that a unit reads."""
        if value in self.made:
            place = self.made[value]
            return self.at.get(place._replace(unit=place.unit + 1))
        if value in self.owners:
            unit, name = self.owners[value]
            return self.owned.get((unit + 1, name))
        return self._itself(value)

    def _itself(self, value: Value) -> Value | str:
        return FOLD_KEY if value in self.keys else value

    def _ops(self) -> Iterator[Op]:
        """The ops of the deeper step: copies come after the forward of their unit, and before its backward."""
        copied = [op for op in self.main.ops if self.units.get(op) == COPIED]
        forward = [op for op in copied if op.loc.side != BACKWARD]
        backward = [op for op in copied if op.loc.side == BACKWARD]
        for op in self.main.ops:
            if op in backward[:1]:
                for copy in reversed(self._copies):
                    yield from self._copied(backward, copy)
            yield self._kept(op)
            if op in forward[-1:]:
                for copy in self._copies:
                    yield from self._copied(forward, copy)

    def _copied(self, ops: Sequence[Op], copy: int) -> Iterator[Op]:
        """These ops of the copied unit, as a copy has them; random keys come before their first readers."""
        drawn: set[Value] = set()
        for op in ops:
            for value in op.inputs():
                if value in self.keys and value not in drawn and op.loc.side != BACKWARD:
                    drawn.add(value)
                    yield from self._copied([self.keys[value]], copy)
            mapping = {value: self._in_copy(value, copy) for value in op.inputs()}
            results = tuple(self.new[result, copy] for result in op.results)
            loc = replace(op.loc, module=self._raised(op.loc.module, copy))
            yield replace(op.with_operands(mapping), results=results, loc=loc)

    def _in_copy(self, value: Value, copy: int) -> Value:
        """What a copy reads where the copied unit reads `value`."""
        if (value, copy) in self.new:
            return self.new[value, copy]
        if value not in self.made:
            return value
        place = self.made[value]
        own = self.at[place._replace(unit=COPIED)]
        match place.unit - COPIED:
            case -1:
                return own if copy == 1 else self.new[own, copy - 1]
            case 1:
                return value if copy == self.copies else self.new[own, copy + 1]
            case _:
                raise _IrregularError

    def _kept(self, op: Op) -> Op:
        """An op of the step: where it read a unit beyond the copies, it reads the copy next to it."""
        unit = self.units.get(op)
        mapping = {value: self._next_to(unit, value) for value in op.inputs()}
        return replace(op.with_operands(mapping), loc=replace(op.loc, module=self._moved(op.loc.module)))

    def _next_to(self, reader: int | None, value: Value) -> Value:
        """What an op of a unit, or of none, reads where it read `value`."""
        if value not in self.made:
            return self.renamed.get(value, value)
        place = self.made[value]
        if reader is None:
            if self._is_amid(place):
                raise _IrregularError
            return value
        if (reader > COPIED) == (place.unit > COPIED):
            return value
        if (reader, place.unit) == (COPIED + 1, COPIED):
            return self.new[value, self.copies]
        if (reader, place.unit) == (COPIED, COPIED + 1):
            return self.new[self.at[place._replace(unit=COPIED)], 1]
        raise _IrregularError

    def _is_amid(self, place: _InUnit) -> bool:
        """Whether a place has units below and above: what reads it from outside may read all, or count them."""
        return 0 < place.unit < self.stack.units - 1

    def _with_copies(self, values: Sequence[Value], roles: Sequence[Role]) -> list[tuple[Value, Role]]:
        """Parameters or results, with those of the copies after those of the copied unit."""
        found: list[tuple[Value, Role]] = []
        copied: list[tuple[Value, Role]] = []
        end = 0
        for value, role in zip(values, roles, strict=True):
            found.append((self.renamed.get(value, value), replace(role, label=self._moved(role.label))))
            if self._unit(role.label) == COPIED:
                copied.append((value, role))
                end = len(found)
            elif (place := self.made.get(value)) and self._is_amid(place) and self._unit(role.label) != place.unit:
                raise _IrregularError
        if any((value, 1) not in self.new for value, _ in copied):
            raise _IrregularError
        copies = [
            (self.new[value, copy], replace(role, label=self._raised(role.label, copy)))
            for copy in self._copies
            for value, role in copied
        ]
        return [*found[:end], *copies, *found[end:]]


def _form(op: Op) -> Hashable:
    """What equal ops of two units have in common."""
    return op.name, tuple(sorted(op.attrs.items())), tuple(result.type for result in op.results)


def _with_keys_in_order(ops: Sequence[Op]) -> tuple[Op, ...]:
    """The ops, with their random keys numbered in order."""
    numbers = count()
    return tuple(
        replace(op, attrs={**op.attrs, "instance": next(numbers)}) if op.name == FOLD_KEY else op for op in ops
    )
