"""The layout problem of a module: choices with costs, and the flows of values between them.

A choice is one op of a function (once, however often the function is called), a parameter of a function, or a main
result. Views have no choice: the state wanted of a view is pulled back to its operand, so that all readers of one
value share one resharding:

    %t = aten.permute %x {dims = [1, 0]} : f32[4, 8]
    %y = aten.mm %t, %w : f32[4, 6]                     # a strategy wants %t as f32[4, 8{tp}]
is the same as a use of `%x` that wants it as f32[8{tp}, 4].
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import REPLICATED, State
from moaic.ir.ops import Kind, kind_of
from moaic.ir.rules import Strategy
from moaic.passes.sharding.solver.costs import LayoutCosts, ValueRole
from moaic.passes.sharding.solver.strategy_sets import StrategySets, needs_strategy
from moaic.passes.sharding.solver.value_classes import equivalence_classes

StateMap = Mapping[State, State]
"""For each state of a view, that of its operand."""


@dataclass(frozen=True, eq=False, slots=True)
class StrategyChoice:
    """One of several strategies must be taken; `costs` are seconds per step."""

    strategies: tuple[Strategy, ...]
    costs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Use:
    """A choice that reads a value as operand number `operand`, possibly through views."""

    choice: StrategyChoice
    operand: int
    pull: tuple[tuple[State, State], ...] | None = None
    """Pairs of a state of the operand and the state of the value itself, if views are between them."""

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
    uses: tuple[Use, ...]
    weight: int
    """Number of values that this one represents, in all calls of a step."""
    role: ValueRole


@dataclass(frozen=True, slots=True)
class Problem:
    choices: tuple[StrategyChoice, ...]
    flows: tuple[Flow, ...]
    pulls: Mapping[Op, StateMap]
    """The views without a choice."""
    of_op: Mapping[Op, StrategyChoice]
    of_param: Mapping[Value, StrategyChoice]
    of_result: Mapping[int, StrategyChoice]
    """By position in the main results."""


def problem(module: Module, sets: StrategySets, costs: LayoutCosts, inputs_sharded: bool = False) -> Problem:
    """The problem of adding an axis to `module`; inputs are replicated, unless `inputs_sharded` gives them a choice."""
    builder = _Builder(module, sets, costs, ("param", "buffer", *(("input", "tangent") if inputs_sharded else ())))
    builder.build()
    return Problem(
        tuple(builder.choices), tuple(builder.flows), builder.pulls, builder.of_op, builder.of_param, builder.of_result
    )


@dataclass(slots=True)
class _Builder:
    module: Module
    sets: StrategySets
    layout_costs: LayoutCosts
    shardable: tuple[str, ...]
    """Role kinds of main parameters that may be sharded."""
    choices: list[StrategyChoice] = field(default_factory=list[StrategyChoice])
    flows: list[Flow] = field(default_factory=list[Flow])
    pulls: dict[Op, StateMap] = field(default_factory=dict[Op, StateMap])
    of_op: dict[Op, StrategyChoice] = field(default_factory=dict[Op, StrategyChoice])
    of_param: dict[Value, StrategyChoice] = field(default_factory=dict[Value, StrategyChoice])
    of_result: dict[int, StrategyChoice] = field(default_factory=dict[int, StrategyChoice])
    producer: dict[Value, tuple[StrategyChoice, int]] = field(default_factory=dict[Value, tuple[StrategyChoice, int]])
    """The choice and result number of every value that has one."""

    def build(self) -> None:
        roles = value_roles(self.module)
        times = self.module.runs()
        representatives = {f: self._representatives(f) for f in self.module.functions}
        for function in self.module.functions:
            counts = _counts(function, representatives[function], function.values())
            if function is self.module.main:
                self._main_params(function, representatives[function], counts)
            else:
                self._params(function, times[function.name])
            self._ops(function, representatives[function], counts, times[function.name])
        self._results(self.module.main)
        for function in self.module.functions:
            self._flows(function, representatives[function], roles, times[function.name])

    def _representatives(self, function: Function) -> Mapping[Value, Value]:
        """For each value the one that has its choice: only the main function repeats equivalent values."""
        return (
            equivalence_classes(function)
            if function is self.module.main
            else {value: value for value in function.values()}
        )

    def _choose(self, strategies: Sequence[Strategy], costs: Sequence[float]) -> StrategyChoice:
        choice = StrategyChoice(tuple(strategies), tuple(costs))
        self.choices.append(choice)
        return choice

    def _main_params(self, main: Function, representatives: Mapping[Value, Value], counts: Mapping[Value, int]) -> None:
        """A choice per shardable parameter; any other is replicated."""
        for index, value in enumerate(main.params):
            kind = main.param_role(index).kind
            representative = representatives[value]
            if representative is not value:
                self._param(value, self.of_param[representative])
                continue
            states: tuple[State, ...] = self.sets.complete(value) if kind in self.shardable else (REPLICATED,)
            factor = counts[value] if kind == "param" else 0
            self._param(
                value, self._identity(states, [factor * self.layout_costs.persistent(value, state) for state in states])
            )

    def _params(self, function: Function, times: int) -> None:
        saved = _producer_calls(self.module)
        for value in function.params:
            states = self.sets.complete(value)
            factor = times if value in saved else 0
            self._param(
                value, self._identity(states, [factor * self.layout_costs.saved(value, state) for state in states])
            )

    def _identity(self, states: Sequence[State], costs: Sequence[float]) -> StrategyChoice:
        """A choice whose strategies read and return a value in one state."""
        return self._choose([Strategy((state,), (state,)) for state in states], costs)

    def _param(self, value: Value, choice: StrategyChoice) -> None:
        self.of_param[value] = choice
        self.producer[value] = (choice, 0)

    def _ops(
        self, function: Function, representatives: Mapping[Value, Value], counts: Mapping[Value, int], times: int
    ) -> None:
        results, passed = set(function.results), self._passed(function, representatives)
        defining = {result: op for op in function.ops for result in op.results}
        for op in function.ops:
            if op.name == "call":
                inner = self.module.function(op.callee).results
                self.producer.update(
                    (o, self.producer[i]) for o, i in zip(op.results, inner, strict=True) if i in self.producer
                )
            elif needs_strategy(op):
                first = defining[representatives[op.results[0]]]
                pull = self._pull(op, results, passed) if first is op else self.pulls.get(first)
                if pull is not None:
                    self.pulls[op] = pull
                    continue
                choice = self._op(op, times * counts[op.results[0]]) if first is op else self.of_op[first]
                self.of_op[op] = choice
                self.producer.update((result, (choice, i)) for i, result in enumerate(op.results))

    def _op(self, op: Op, times: int) -> StrategyChoice:
        strategies = self.sets.strategies[op]
        return self._choose(strategies, [times * self.layout_costs.op(op, strategy) for strategy in strategies])

    def _passed(self, function: Function, representatives: Mapping[Value, Value]) -> Mapping[Value, set[State]]:
        """For each value passed to calls, the states in which their callees may take it."""
        passed: dict[Value, set[State]] = defaultdict(set)
        for op in function.ops:
            if op.name == "call":
                for value, param in zip(op.inputs(), self.module.function(op.callee).params, strict=True):
                    passed[representatives[value]].update(self.sets.complete(param))
        return passed

    def _pull(self, op: Op, results: set[Value], passed: Mapping[Value, set[State]]) -> StateMap | None:
        """The map that pulls states of a view back to its operand; None where the view needs a choice of its own."""
        if kind_of(op) is not Kind.VIEW or len(op.results) != 1 or op.results[0] in results:
            return None
        (source,), (target,) = op.inputs(), op.results
        if target.type.elements() < source.type.elements():
            return None
        pull = {strategy.results[0]: strategy.operands[0] for strategy in self.sets.strategies[op]}
        wanted = {*self.sets.splits.get(target, ()), *passed.get(target, ())}
        return pull if wanted <= pull.keys() else None

    def _results(self, main: Function) -> None:
        labels = {main.param_role(i).label: param for i, param in enumerate(main.params) if main.param_role(i).label}
        for index, value in enumerate(main.results):
            role = main.result_role(index)
            if role.kind in ("grad", "update") and role.label in labels:
                self.of_result[index] = self.of_param[labels[role.label]]
                continue
            states = self.sets.complete(value) if role.kind == "output" else (REPLICATED,)
            self.of_result[index] = self._choose([Strategy((state,), ()) for state in states], [0.0] * len(states))

    def _flows(
        self, function: Function, representatives: Mapping[Value, Value], roles: Mapping[Value, ValueRole], times: int
    ) -> None:
        uses: dict[Value, dict[Use, None]] = defaultdict(dict)
        for reader, value in self._readings(function):
            uses[value][reader] = None
        merged: dict[Value, dict[Use, None]] = defaultdict(dict)
        for value, readers in uses.items():
            merged[representatives[value]].update(readers)
        counts = _counts(function, representatives, uses)
        for value, readers in merged.items():
            if value in self.producer:
                choice, result = self.producer[value]
                role = roles.get(value, ValueRole.ACTIVATION)
                self.flows.append(Flow(value, choice, result, tuple(readers), times * counts[value], role))

    def _readings(self, function: Function) -> Iterator[tuple[Use, Value]]:
        """Every use of every value other than a pulled-back view; uses of such a view count for its operand."""
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


def _counts(function: Function, representatives: Mapping[Value, Value], values: Iterable[Value]) -> Counter[Value]:
    """How many of these values each representative stands for, where calls may stand for several (`Op.times`)."""
    times = _times(function)
    counts = Counter[Value]()
    for value in values:
        counts[representatives[value]] += times.get(value, 1)
    return counts


def _times(function: Function) -> Mapping[Value, int]:
    """By value, how many it stands for: as many as the call that makes it, or as all calls that read it.

    %c = aten._to_copy %w0 : bf16[64, 64]                   # %w0 and %c as many as the call
    %h, %s = call @layers.fwd %h0, %c, %rope {times = 31}   # %h and %s as many as the call
    %t = call @layers.fwd %h, %w1, %rope                    # %rope is one value, that all layers read
    """
    if all(op.name != "call" or op.times == 1 for op in function.ops):
        return {}
    read: dict[Value, int] = {}
    for op in reversed(function.ops):
        times = op.times if op.name == "call" else min((read.get(result, 1) for result in op.results), default=1)
        read.update((value, min(times, read.get(value, times))) for value in op.inputs())
    made: dict[Value, int] = {}
    for op in function.ops:
        own = op.times if op.name == "call" else max((made.get(value, 1) for value in op.inputs()), default=1)
        made.update(dict.fromkeys(op.results, own))
    of_calls = {result for op in function.ops if op.name == "call" for result in op.results}
    return {
        value: made.get(value, 1) if value in of_calls else max(made.get(value, 1), read.get(value, 1))
        for value in function.values()
    }


def value_roles(module: Module) -> dict[Value, ValueRole]:
    """The roles of weights and gradients; every other value is an activation."""
    main = module.main
    gradients = (main.results[i] for i in main.gradients)
    return {**dict.fromkeys(gradients, ValueRole.GRADIENT), **dict.fromkeys(weight_values(module), ValueRole.WEIGHT)}


def weight_values(module: Module) -> set[Value]:
    """Parameters, and values computed from parameters alone without a heavy op."""
    callers: dict[Value, list[Value]] = defaultdict(list)
    for function in module.functions:
        for op in function.ops:
            if op.name == "call":
                for value, param in zip(op.inputs(), module.function(op.callee).params, strict=True):
                    callers[param].append(value)
    weights: set[Value] = set()
    for function in reversed(module.functions):
        is_main = function is module.main
        for index, param in enumerate(function.params):
            given = callers[param]
            if function.param_role(index).kind == "param" if is_main else given and all(v in weights for v in given):
                weights.add(param)
        for op in function.ops:
            inputs = list(op.inputs())
            if needs_strategy(op) and kind_of(op) is not Kind.HEAVY and inputs and all(v in weights for v in inputs):
                weights.update(op.results)
    return weights


def _producer_calls(module: Module) -> set[Value]:
    """Parameters of functions that receive results of other calls."""
    made = {result for op in module.main.ops if op.name == "call" for result in op.results}
    calls = [op for op in module.main.ops if op.name == "call"]
    pairs = (pair for op in calls for pair in zip(op.inputs(), module.function(op.callee).params, strict=True))
    return {param for value, param in pairs if value in made}
