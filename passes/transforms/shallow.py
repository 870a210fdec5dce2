"""Shallow copies of a step: the same step with fewer equal layers, from which the prices of a deep one follow.

Only an outlined step has them, and what is made of it. Layers are equal where they are calls of the same functions, or
sequences of such calls with a common period (`LocalLayer, GlobalLayer, LocalLayer, …`). A layer is taken out by passing
on what the layer below it, or in the backward the one above it, made:

    %h1 = call @layers.fwd %h0, %w0 in "layers.0"
    %h2 = call @layers.fwd %h1, %w1 in "layers.1"
    %h3 = call @layers.fwd %h2, %w2 in "layers.2"
    %h4 = call @layers.fwd %h3, %w3 in "layers.3"
becomes
    %h1 = call @layers.fwd %h0, %w0 in "layers.0"
    %h2 = call @layers.fwd %h1, %w1 {times = 2} in "layers.1"
    %h4 = call @layers.fwd %h2, %w3 in "layers.3"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from moaic.ir.graph import Function, Module, Op, Value
from moaic.passes.transforms.dce import without_dead_ops
from moaic.passes.transforms.outline import layer_of

MOST_PERIOD = 8
"""Most layers of different kinds that follow each other in a pattern."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Consecutive layers of one container, `period` of which are a unit; all units are equal."""

    container: str
    first: int
    """Number of the first layer."""
    period: int
    units: int

    def has(self, container: str, layer: int) -> bool:
        """Whether this layer is one of the stack."""
        return container == self.container and 0 <= layer - self.first < self.period * self.units


def stacks_of(main: Function) -> list[Stack]:
    """The longest stack of each container of layers with at least two equal units."""
    layers: dict[str, dict[int, list[Hashable]]] = defaultdict(lambda: defaultdict(list))
    for op in main.ops:
        if op.name == "call" and (place := layer_of(op.loc.module)) is not None:
            layers[place[0]][place[1]].append((op.callee, op.loc.side))
    found = (
        longest_stack(container, {number: tuple(calls) for number, calls in members.items()})
        for container, members in layers.items()
    )
    return [stack for stack in found if stack.units > 1]


def longest_stack(container: str, kinds: Mapping[int, Hashable]) -> Stack:
    """The longest stack of equal units among the layers of a container, given the kind of each by its number."""
    numbers = sorted(kinds)
    best = Stack(container, numbers[0], 1, 1)
    for period in range(1, min(MOST_PERIOD, len(numbers) // 2) + 1):
        start = numbers[0]
        for number in numbers:
            if kinds.get(number - period) != kinds[number]:
                start = max(start, number - period + 1)
            units = (number - start + 1) // period
            if units * period > best.units * best.period and units > 1:
                best = Stack(container, start, period, units)
    return best


def shallow(module: Module, stack: Stack, units: int) -> Module | None:
    """`module` with `units` (three or more) of the stack; None where other ops depend on the rest.

    These are the two lowest and the highest ones; calls of the second stand for those that are taken out (`Op.times`).
    """
    return _Removal(module, stack, units).run()


class _Place(NamedTuple):
    """Where a value of a layer is made: the layer, its side, the op's place on it, and the result's.

    Ops are counted from the last one. Passes put ahead of the others what reshards the operands of a layer, and only
    the layer at the end of a stack reads what is sharded otherwise:

        %x = moai.all_reduce %h in "layers.0"               # op 1
        %h1 = call @layers.fwd %x, %w1 in "layers.0"        # op 0
        %h2 = call @layers.fwd %h1, %w2 in "layers.1"       # op 0
    """

    layer: int
    side: str
    op: int
    result: int


class _Removal:
    """The removal of all but so many units of a stack from the main function of a module."""

    def __init__(self, module: Module, stack: Stack, units: int) -> None:
        self.module = module
        self.main = module.main
        self.stack = stack
        found = {place for op in self.main.ops if (place := layer_of(op.loc.module)) is not None}
        numbers = sorted(number for container, number in found if container == stack.container)
        self.order = {number: index for index, number in enumerate(numbers)}
        """By number of a layer, how many layers there are below it: a shallow step leaves some numbers out."""
        start = self.order[stack.first] + 2 * stack.period
        self.out = range(start, start + stack.period * (stack.units - units))
        """The layers to take out, counted from the lowest."""
        self.made: dict[Value, _Place] = {}
        """By value of the container's layers."""
        self.at: dict[_Place, Value] = {}
        self.aliases: dict[Value, Value] = {}

    def run(self) -> Module | None:
        removed = self._removed()
        if not self._is_uniform():
            return None
        ops: list[Op] = []
        for op in self.main.ops:
            if op in removed:
                continue
            gone = [value for value in op.inputs() if self._is_out(value)]
            layer = self._layer(op)
            if gone and layer is None:
                if not self._passed_on(op):
                    return None
                continue
            instead = {value: self._instead(value, layer or 0) for value in gone}
            if None in instead.values():
                return None
            kept = op.with_operands(self.aliases | {old: new for old, new in instead.items() if new is not None})
            ops.append(self._standing_for_more(kept, layer))
        return self._without(removed, ops)

    def _standing_for_more(self, op: Op, layer: int | None) -> Op:
        """The op; calls of the layers below those that are taken out stand for these, too."""
        if op.name != "call" or layer not in range(self.out.start - self.stack.period, self.out.start):
            return op
        return replace(op, attrs={**op.attrs, "times": op.times + len(self.out) // self.stack.period})

    def _removed(self) -> set[Op]:
        """The ops of the layers to take out; records what every layer makes."""
        places: dict[tuple[int, str], int] = defaultdict(int)
        removed: set[Op] = set()
        for op in reversed(self.main.ops):
            if (layer := self._layer(op)) is None:
                continue
            for index, result in enumerate(op.results):
                self.made[result] = place = _Place(layer, op.loc.side, places[layer, op.loc.side], index)
                self.at[place] = result
            places[layer, op.loc.side] += 1
            if layer in self.out:
                removed.add(op)
        return removed

    def _is_uniform(self) -> bool:
        """Whether the calls of the unit below those that are out can stand for these: its layers make the same."""
        makes: dict[tuple[int, str], list[Hashable]] = defaultdict(list)
        for place, value in self.at.items():
            makes[place.layer, place.side].append((place.op, place.result, value.type))
        return all(
            makes[layer, side] == makes[layer - self.stack.period, side]
            for layer in self.out
            for side in {side for _, side in makes}
        )

    def _layer(self, op: Op) -> int | None:
        """How many layers there are below that of an op; None if it is in none of this container."""
        place = layer_of(op.loc.module)
        return self.order[place[1]] if place is not None and place[0] == self.stack.container else None

    def _is_out(self, value: Value) -> bool:
        return value in self.made and self.made[value].layer in self.out

    def _instead(self, value: Value, reader: int) -> Value | None:
        """What a layer reads instead of a removed one's value: that of the layer as far beyond the removed ones.

        None where that makes no such value.
        """
        place = self.made[value]
        layer = place.layer + (-len(self.out) if reader > place.layer else len(self.out))
        instead = self.at.get(place._replace(layer=layer))
        return instead if instead is not None and instead.type == value.type else None

    def _passed_on(self, op: Op) -> bool:
        """Whether `op` only adds a removed layer's value to a sum, which then stays as it was."""
        kept = [value for value in op.inputs() if not self._is_out(value)]
        if op.name != "aten.add.Tensor" or len(kept) != 1 or kept[0].type != op.results[0].type or op.attrs:
            return False
        self.aliases[op.results[0]] = self.aliases.get(kept[0], kept[0])
        return True

    def _without(self, removed: Collection[Op], ops: Sequence[Op]) -> Module:
        """The module of these ops, without the parameters and results that only removed layers had."""
        main = self.main
        results = [i for i, value in enumerate(main.results) if not self._is_out(value)]
        short = replace(
            main,
            ops=tuple(ops),
            results=tuple(self.aliases.get(main.results[i], main.results[i]) for i in results),
            result_roles=tuple(main.result_role(i) for i in results),
        )
        short = without_dead_ops(replace(self.module, functions=(*self.module.functions[:-1], short)))
        before = {value for op in main.ops for value in op.inputs()}
        after = {*short.main.results, *(value for op in short.main.ops for value in op.inputs())}
        kept = [i for i, param in enumerate(main.params) if param in after or param not in before]
        alone = replace(
            short.main,
            params=tuple(main.params[i] for i in kept),
            param_roles=tuple(main.param_role(i) for i in kept),
        )
        return replace(short, functions=(*short.functions[:-1], alone))
