"""The layout problem of a module: choices with prices, and the flows of values between them.

A choice is one op of a function (once, however often the function is called), a parameter of a function, or a main
result. Views are no choices: a state that is wanted of a view is pulled back to what it looks at, so that all who look
at one value share one conversion.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import REPLICATED, State
from moaic.ir.ops import Kind, kind_of
from moaic.ir.rules import Strategy
from moaic.passes.sharding.solver.costs import LayoutCosts, ValueRole
from moaic.passes.sharding.solver.strategy_sets import StrategySets, needs_strategy
from moaic.passes.sharding.solver.value_classes import twins

StateMap = Mapping[State, State]
"""For a state of a view the state of what it looks at."""


@dataclass(frozen=True, eq=False, slots=True)
class StrategyChoice:
    """One of several strategies must be taken; `costs` are seconds per step."""

    strategies: tuple[Strategy, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """A choice that reads a value as its operand number `operand`, perhaps through views."""

    choice: StrategyChoice
    operand: int
    pull: tuple[tuple[State, State], ...] | None = None
    """Pairs of a state of what is read and the state of the value itself, if there are views between."""

    def wanted(self, strategy: Strategy) -> State:
        """The state of the value that a strategy of the choice wants."""
        state = strategy.operands[self.operand]
        return state if self.pull is None else dict(self.pull)[state]


@dataclass(frozen=True, slots=True)
class Flow:
    """A value from the choice that makes it (as result number `result`) to those that read it."""

    value: Value
    choice: StrategyChoice
    result: int
    sinks: tuple[Use, ...]
    weight: int
    """Values that this one stands for, in all calls of a step."""
    standing: ValueRole


@dataclass(frozen=True, slots=True)
class Problem:
    choices: tuple[StrategyChoice, ...]
    flows: tuple[Flow, ...]
    pulls: Mapping[Op, StateMap]
    """The views that are no choices."""
    of_op: Mapping[Op, StrategyChoice]
    of_param: Mapping[Value, StrategyChoice]
    of_result: Mapping[int, StrategyChoice]
    """By position in the main results."""


def problem(module: Module, possible: StrategySets, pricing: LayoutCosts, inputs_split: bool = False) -> Problem:
    """The problem of putting an axis into `module`; inputs come whole, or in parts where that is best."""
    builder = _Builder(module, possible, pricing, ("param", "buffer", *(("input", "tangent") if inputs_split else ())))
    builder.build()
    return Problem(
        tuple(builder.choices), tuple(builder.flows), builder.pulls, builder.of_op, builder.of_param, builder.of_result
    )


@dataclass(slots=True)
class _Builder:
    module: Module
    possible: StrategySets
    pricing: LayoutCosts
    resting: tuple[str, ...]
    """Kinds of main parameters that may lie in parts."""
    choices: list[StrategyChoice] = field(default_factory=list[StrategyChoice])
    flows: list[Flow] = field(default_factory=list[Flow])
    pulls: dict[Op, StateMap] = field(default_factory=dict[Op, StateMap])
    of_op: dict[Op, StrategyChoice] = field(default_factory=dict[Op, StrategyChoice])
    of_param: dict[Value, StrategyChoice] = field(default_factory=dict[Value, StrategyChoice])
    of_result: dict[int, StrategyChoice] = field(default_factory=dict[int, StrategyChoice])
    made_by: dict[Value, tuple[StrategyChoice, int]] = field(default_factory=dict[Value, tuple[StrategyChoice, int]])
    """The choice and result number of every value that has one."""

    def build(self) -> None:
        standing = standings(self.module)
        times = self.module.runs()
        alike = {f: self._alike(f) for f in self.module.functions}
        for function in self.module.functions:
            counts = Counter(alike[function].values())
            if function is self.module.main:
                self._main_params(function, alike[function], counts)
            else:
                self._params(function, times[function.name])
            self._ops(function, alike[function], counts, times[function.name])
        self._results(self.module.main)
        for function in self.module.functions:
            self._flows(function, alike[function], standing, times[function.name])

    def _alike(self, function: Function) -> Mapping[Value, Value]:
        """Who decides for each value: only the main function writes out what is repeated."""
        return twins(function) if function is self.module.main else {value: value for value in function.values()}

    def _choose(self, strategies: Sequence[Strategy], costs: Sequence[float]) -> StrategyChoice:
        choice = StrategyChoice(tuple(strategies), tuple(costs))
        self.choices.append(choice)
        return choice

    def _main_params(self, main: Function, alike: Mapping[Value, Value], counts: Mapping[Value, int]) -> None:
        """Parameters rest as is best; what else comes from outside comes whole."""
        for index, value in enumerate(main.params):
            kind = main.param_role(index).kind
            first = alike[value]
            if first is not value:
                self._param(value, self.of_param[first])
                continue
            states: tuple[State, ...] = self.possible.resting(value) if kind in self.resting else (REPLICATED,)
            price = counts[value] if kind == "param" else 0
            self._param(value, self._standing(states, [price * self.pricing.resting(value, state) for state in states]))

    def _params(self, function: Function, times: int) -> None:
        saved = _made_by_calls(self.module)
        for value in function.params:
            states = self.possible.resting(value)
            price = times if value in saved else 0
            self._param(value, self._standing(states, [price * self.pricing.saving(value, state) for state in states]))

    def _standing(self, states: Sequence[State], costs: Sequence[float]) -> StrategyChoice:
        """A choice that takes a value in and gives it out in one state."""
        return self._choose([Strategy((state,), (state,)) for state in states], costs)

    def _param(self, value: Value, choice: StrategyChoice) -> None:
        self.of_param[value] = choice
        self.made_by[value] = (choice, 0)

    def _ops(self, function: Function, alike: Mapping[Value, Value], counts: Mapping[Value, int], times: int) -> None:
        results, passed = set(function.results), self._passed(function, alike)
        producer = {result: op for op in function.ops for result in op.results}
        for op in function.ops:
            if op.name == "call":
                inner = self.module.function(op.callee).results
                self.made_by.update(
                    (o, self.made_by[i]) for o, i in zip(op.results, inner, strict=True) if i in self.made_by
                )
            elif needs_strategy(op):
                twin = producer[alike[op.results[0]]]
                pull = self._pull(op, results, passed) if twin is op else self.pulls.get(twin)
                if pull is not None:
                    self.pulls[op] = pull
                    continue
                choice = self._op(op, times * counts[op.results[0]]) if twin is op else self.of_op[twin]
                self.of_op[op] = choice
                self.made_by.update((result, (choice, i)) for i, result in enumerate(op.results))

    def _op(self, op: Op, times: int) -> StrategyChoice:
        strategies = self.possible.strategies[op]
        return self._choose(strategies, [times * self.pricing.op(op, strategy) for strategy in strategies])

    def _passed(self, function: Function, alike: Mapping[Value, Value]) -> Mapping[Value, set[State]]:
        """The states in which calls may want values that are passed to them: those of any call of the same function."""
        passed: dict[Value, set[State]] = defaultdict(set)
        for op in function.ops:
            if op.name == "call":
                for value, param in zip(op.inputs(), self.module.function(op.callee).params, strict=True):
                    passed[alike[value]].update(self.possible.resting(param))
        return passed

    def _pull(self, op: Op, results: set[Value], passed: Mapping[Value, set[State]]) -> StateMap | None:
        """How states of a view pull back; None where it must be a choice of its own."""
        if kind_of(op) is not Kind.VIEW or len(op.results) != 1 or op.results[0] in results:
            return None
        (source,), (target,) = op.inputs(), op.results
        if target.type.elements() < source.type.elements():
            return None
        pull = {strategy.results[0]: strategy.operands[0] for strategy in self.possible.strategies[op]}
        wanted = {*self.possible.splits.get(target, ()), *passed.get(target, ())}
        return pull if wanted <= pull.keys() else None

    def _results(self, main: Function) -> None:
        labels = {main.param_role(i).label: param for i, param in enumerate(main.params) if main.param_role(i).label}
        for index, value in enumerate(main.results):
            role = main.result_role(index)
            if role.kind in ("grad", "update") and role.label in labels:
                self.of_result[index] = self.of_param[labels[role.label]]
                continue
            states = self.possible.resting(value) if role.kind == "output" else (REPLICATED,)
            self.of_result[index] = self._choose([Strategy((state,), ()) for state in states], [0.0] * len(states))

    def _flows(
        self, function: Function, alike: Mapping[Value, Value], standing: Mapping[Value, ValueRole], times: int
    ) -> None:
        sinks: dict[Value, dict[Use, None]] = defaultdict(dict)
        for reader, value in self._readings(function):
            sinks[value][reader] = None
        merged: dict[Value, dict[Use, None]] = defaultdict(dict)
        for value, found in sinks.items():
            merged[alike[value]].update(found)
        counts = Counter(alike[value] for value in sinks)
        for value, found in merged.items():
            if value in self.made_by:
                choice, result = self.made_by[value]
                stands = standing.get(value, ValueRole.ACTIVATION)
                self.flows.append(Flow(value, choice, result, tuple(found), times * counts[value], stands))

    def _readings(self, function: Function) -> Iterator[tuple[Use, Value]]:
        """Every reader of every value that is not a pulled view, views looked through."""
        source = {op.results[0]: op for op in function.ops if op in self.pulls}

        def through(choice: StrategyChoice, operand: int, value: Value) -> tuple[Use, Value]:
            pull: dict[State, State] | None = None
            while value in source:
                step = self.pulls[source[value]]
                pull = dict(step) if pull is None else {of: step[state] for of, state in pull.items() if state in step}
                (value,) = source[value].inputs()
            return Use(choice, operand, None if pull is None else tuple(pull.items())), value

        for op in function.ops:
            if op.name == "call":
                params = self.module.function(op.callee).params
                for value, param in zip(op.inputs(), params, strict=True):
                    yield through(self.of_param[param], 0, value)
            elif op in self.of_op:
                for operand, value in enumerate(op.inputs()):
                    yield through(self.of_op[op], operand, value)
        if function is self.module.main:
            for index, value in enumerate(function.results):
                yield through(self.of_result[index], 0, value)


def standings(module: Module) -> dict[Value, ValueRole]:
    """Weights and gradients; everything else is an activation."""
    main = module.main
    gradients = (main.results[i] for i in main.gradients)
    return {**dict.fromkeys(gradients, ValueRole.GRADIENT), **dict.fromkeys(weight_values(module), ValueRole.WEIGHT)}


def weight_values(module: Module) -> set[Value]:
    """Parameters, and what is made of parameters alone without a heavy op."""
    callers: dict[Value, list[Value]] = defaultdict(list)
    for function in module.functions:
        for op in function.ops:
            if op.name == "call":
                for value, param in zip(op.inputs(), module.function(op.callee).params, strict=True):
                    callers[param].append(value)
    found: set[Value] = set()
    for function in reversed(module.functions):
        is_main = function is module.main
        for index, param in enumerate(function.params):
            given = callers[param]
            if function.param_role(index).kind == "param" if is_main else given and all(v in found for v in given):
                found.add(param)
        for op in function.ops:
            inputs = list(op.inputs())
            if needs_strategy(op) and kind_of(op) is not Kind.HEAVY and inputs and all(v in found for v in inputs):
                found.update(op.results)
    return found


def _made_by_calls(module: Module) -> set[Value]:
    """Parameters of functions that receive what another call has made."""
    made = {result for op in module.main.ops if op.name == "call" for result in op.results}
    calls = [op for op in module.main.ops if op.name == "call"]
    pairs = (pair for op in calls for pair in zip(op.inputs(), module.function(op.callee).params, strict=True))
    return {param for value, param in pairs if value in made}
