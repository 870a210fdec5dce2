"""The states that each value may take on one axis, and the strategies of each op: the closure of seed shardings.

Seed shardings are those of the weights and of the inputs' dims other than the batch, unless the caller gives others.
They propagate through the rules in both directions, and through calls. The batch belongs to other axes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moaic.ir.graph import Module, Op, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Sharded, State
from moaic.ir.ops import Kind, kind_of, rule_of
from moaic.ir.rules import Dims, Rule, Strategy, fits
from moaic.passes.sharding.axis import Axis


@dataclass(frozen=True, slots=True)
class StrategySets:
    """The shardings of values and the strategies of ops (the replicated one last) that an axis allows in a module."""

    splits: Mapping[Value, tuple[State, ...]]
    strategies: Mapping[Op, tuple[Strategy, ...]]

    def complete(self, value: Value) -> tuple[State, ...]:
        """The states of `value` other than partial."""
        return (*self.splits.get(value, ()), REPLICATED)


SeedShardings = Callable[[Module, Axis], Iterable[tuple[Value, State]]]
"""The values and shardings at which propagation begins."""


def find_strategies(
    module: Module,
    axis: Axis,
    seed_shardings: SeedShardings | None = None,
    replicated: Callable[[Module], Collection[Value]] | None = None,
) -> StrategySets:
    """The closure of the seed shardings over `axis`, not yet in the mesh of `module`; `replicated` values stay so."""
    closure = _Closure(module, axis, replicated(module) if replicated else ())
    for value, state in (seed_shardings or _seed_shardings)(module, axis):
        closure.spread(value, state)
    closure.spread_sums(module)
    strategies = {op: (*closure.strategies[op], rule.replicated()) for op, rule in closure.rules.items()}
    return StrategySets({value: tuple(states) for value, states in closure.splits.items()}, strategies)


def needs_strategy(op: Op) -> bool:
    """Whether a strategy is chosen for `op`: calls follow their callee, constants are rebuilt where they are read."""
    return op.name != "call" and kind_of(op) is not Kind.NULLARY


def _seed_shardings(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
    """Contiguous shardings of every dim of a weight of two or more dims, and of every dim but the first of an input."""
    main, n = module.main, axis.size
    for index, value in enumerate(main.params):
        shape, kind = value.type.shape, main.param_role(index).kind
        first = {"param": 0, "input": 1, "tangent": 1}.get(kind)
        if first is None or len(shape) < 2:
            continue
        for dim in range(first, len(shape)):
            if shape[dim] and shape[dim] % n == 0:
                yield value, Sharded(dim, shape[dim] // n)


class _Closure:
    def __init__(self, module: Module, axis: Axis, replicated: Collection[Value]) -> None:
        self.axis = axis
        self.replicated = frozenset(replicated)
        self.mesh = module.mesh.with_axis(axis.name, axis.size)
        self.functions = {function.name: function for function in module.functions}
        self.rules = {op: rule_of(op) for f in module.functions for op in f.ops if needs_strategy(op)}
        self.strategies: dict[Op, dict[Strategy, None]] = {op: {} for op in self.rules}
        self.splits: dict[Value, dict[State, None]] = defaultdict(dict)
        self.uses: dict[Value, list[tuple[Op, Rule, Dims]]] = defaultdict(list)
        self.same: dict[Value, list[Value]] = defaultdict(list)
        for op, rule in self.rules.items():
            for value, dims in _values_with_dims(op, rule):
                self.uses[value].append((op, rule, dims))
        for function in module.functions:
            for op in function.ops:
                if op.name == "call":
                    self._tie(op.inputs(), self.functions[op.callee].params)
                    self._tie(op.results, self.functions[op.callee].results)

    def _tie(self, outside: Iterator[Value] | Sequence[Value], inside: Sequence[Value]) -> None:
        for one, other in zip(outside, inside, strict=True):
            self.same[one].append(other)
            self.same[other].append(one)

    def spread(self, value: Value, state: State) -> None:
        """Propagate the sharding `state` of `value` to all that the rules tie to it."""
        waiting = [(value, state)]
        while waiting:
            value, state = waiting.pop()
            if not isinstance(state, Sharded) or state in self.splits[value] or not self._fits(value, state):
                continue
            self.splits[value][state] = None
            waiting += [(other, state) for other in self.same[value]]
            for op, rule, dims in self.uses[value]:
                strategy = rule.following(dims, state, self.axis.size)
                if strategy is not None and strategy not in self.strategies[op] and self._all_fit(op, strategy):
                    self.strategies[op][strategy] = None
                    waiting += zip((*op.inputs(), *op.results), (*strategy.operands, *strategy.results), strict=True)

    def _fits(self, value: Value, state: State) -> bool:
        return value not in self.replicated and fits(value.type, self.axis.name, state, self.mesh)

    def _all_fit(self, op: Op, strategy: Strategy) -> bool:
        states = (*strategy.operands, *strategy.results)
        pairs = zip((*op.inputs(), *op.results), states, strict=True)
        return all(not isinstance(state, Sharded) or self._fits(value, state) for value, state in pairs)

    def spread_sums(self, module: Module) -> None:
        """Propagate partial values through ops linear in them; heavy ops are left out, as they would run unsharded."""
        partial: set[Value] = set()
        for function in module.functions:
            for op in function.ops:
                if op.name == "call":
                    inside = self.functions[op.callee].results
                    partial.update(one for one, other in zip(op.results, inside, strict=True) if other in partial)
                elif op in self.rules:
                    self._add_linear(op, partial)
                    partial.update(
                        r
                        for s in self.strategies[op]
                        for r, state in zip(op.results, s.results, strict=True)
                        if state == PARTIAL
                    )

    def _add_linear(self, op: Op, partial: set[Value]) -> None:
        inputs = list(op.inputs())
        if kind_of(op) is Kind.HEAVY:
            return
        for linear in self.rules[op].linear:
            if all(inputs[i] in partial for i in linear):
                self.strategies[op][self.rules[op].by_linearity(linear)] = None


def _values_with_dims(op: Op, rule: Rule) -> Iterator[tuple[Value, Dims]]:
    yield from zip(op.inputs(), rule.operands, strict=True)
    yield from zip(op.results, rule.results, strict=True)
