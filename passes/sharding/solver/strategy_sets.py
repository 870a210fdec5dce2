"""Which states a value may take on one axis, and which strategies every op has: the closure of contiguous splits.

Splits start at the weights and at the inputs' dims other than the batch, unless said otherwise, and spread through the
rules in both directions, through calls too. The batch belongs to other axes, so its digits are never reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from moaic.ir.graph import Module, Op, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Sharded, State
from moaic.ir.ops import Kind, kind_of, rule_of
from moaic.ir.rules import Dims, Rule, Strategy, fits
from moaic.passes.sharding.partitioner import Axis


@dataclass(frozen=True, slots=True)
class StrategySets:
    """What an axis may do to a module: splits of values, strategies of ops (the replicated one last)."""

    splits: Mapping[Value, tuple[State, ...]]
    strategies: Mapping[Op, tuple[Strategy, ...]]

    def resting(self, value: Value) -> tuple[State, ...]:
        """States in which a finished value may lie."""
        return (*self.splits.get(value, ()), REPLICATED)


Seeds = Callable[[Module, Axis], Iterable[tuple[Value, State]]]
"""Where splits begin."""


def possible(
    module: Module, axis: Axis, seeds: Seeds | None = None, held: Callable[[Module], Collection[Value]] | None = None
) -> StrategySets:
    """The closure of contiguous splits over `axis`, not yet in the mesh of `module`; what is `held` stays whole."""
    closure = _Closure(module, axis, held(module) if held else ())
    for value, state in (seeds or _seeds)(module, axis):
        closure.spread(value, state)
    closure.spread_sums(module)
    strategies = {op: (*closure.found[op], rule.replicated()) for op, rule in closure.rules.items()}
    return StrategySets({value: tuple(states) for value, states in closure.splits.items()}, strategies)


def needs_strategy(op: Op) -> bool:
    """Whether a strategy is chosen for `op`: calls follow their callee, constants are built where they are read."""
    return op.name != "call" and kind_of(op) is not Kind.NULLARY


def _seeds(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
    """Contiguous splits of every dim of a matrix or larger weight, and of every dim but the first of an input."""
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
    def __init__(self, module: Module, axis: Axis, held: Collection[Value]) -> None:
        self.axis = axis
        self.held = frozenset(held)
        self.mesh = module.mesh.with_axis(axis.name, axis.size)
        self.functions = {function.name: function for function in module.functions}
        self.rules = {op: rule_of(op) for f in module.functions for op in f.ops if needs_strategy(op)}
        self.found: dict[Op, dict[Strategy, None]] = {op: {} for op in self.rules}
        self.splits: dict[Value, dict[State, None]] = defaultdict(dict)
        self.uses: dict[Value, list[tuple[Op, Rule, Dims]]] = defaultdict(list)
        self.same: dict[Value, list[Value]] = defaultdict(list)
        for op, rule in self.rules.items():
            for value, dims in _places(op, rule):
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
        """Everything that follows if `value` is split as `state` says."""
        waiting = [(value, state)]
        while waiting:
            value, state = waiting.pop()
            if not isinstance(state, Sharded) or state in self.splits[value] or not self._fits(value, state):
                continue
            self.splits[value][state] = None
            waiting += [(other, state) for other in self.same[value]]
            for op, rule, dims in self.uses[value]:
                strategy = rule.following(dims, state, self.axis.size)
                if strategy is not None and strategy not in self.found[op] and self._all_fit(op, strategy):
                    self.found[op][strategy] = None
                    waiting += zip((*op.inputs(), *op.results), (*strategy.operands, *strategy.results), strict=True)

    def _fits(self, value: Value, state: State) -> bool:
        return value not in self.held and fits(value.type, self.axis.name, state, self.mesh)

    def _all_fit(self, op: Op, strategy: Strategy) -> bool:
        states = (*strategy.operands, *strategy.results)
        pairs = zip((*op.inputs(), *op.results), states, strict=True)
        return all(not isinstance(state, Sharded) or self._fits(value, state) for value, state in pairs)

    def spread_sums(self, module: Module) -> None:
        """Pending sums pass through ops that are linear in them; heavy ops would run unsplit for that."""
        pending: set[Value] = set()
        for function in module.functions:
            for op in function.ops:
                if op.name == "call":
                    inside = self.functions[op.callee].results
                    pending.update(one for one, other in zip(op.results, inside, strict=True) if other in pending)
                elif op in self.rules:
                    self._add_linear(op, pending)
                    pending.update(
                        r
                        for s in self.found[op]
                        for r, state in zip(op.results, s.results, strict=True)
                        if state == PARTIAL
                    )

    def _add_linear(self, op: Op, pending: set[Value]) -> None:
        inputs = list(op.inputs())
        if kind_of(op) is Kind.HEAVY:
            return
        for linear in self.rules[op].linear:
            if all(inputs[i] in pending for i in linear):
                self.found[op][self.rules[op].by_linearity(linear)] = None


def _places(op: Op, rule: Rule) -> Iterator[tuple[Value, Dims]]:
    yield from zip(op.inputs(), rule.operands, strict=True)
    yield from zip(op.results, rule.results, strict=True)
