"""Put the axis `tp` into a module: layouts inside functions are chosen by an exact solver, from prices alone.

What people call tensor parallelism, with sequence-split norms and residuals, is what comes out where links are fast
enough. The batch is not split: that is what `dp` is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.attention import ATTENTION
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Operand, Role, Value
from moaic.ir.layout import State
from moaic.ir.ops import Kind, kind_of, rule_of
from moaic.ir.ring_attention import is_ring
from moaic.ir.rules import Strategy
from moaic.passes.sharding.partitioner import Axis, Partitioned, Versions, partition
from moaic.passes.sharding.solver.costs import CostCoefficients, LayoutCosts
from moaic.passes.sharding.solver.milp import solve
from moaic.passes.sharding.solver.problem import Problem, StrategyChoice, problem
from moaic.passes.sharding.solver.strategy_sets import StrategySets, possible
from moaic.passes.sharding.split_reductions import take_apart


@dataclass(frozen=True, slots=True)
class SplitTensors:
    name: ClassVar[str] = "tp"
    summary: ClassVar[str] = "split tensors, by the solver"
    ranks: int = 2
    prices: CostCoefficients = CostCoefficients()

    def apply(self, module: Module) -> Module:
        return follow_tensor(module, Axis(self.name, self.ranks), self.prices).module


def follow_tensor(module: Module, axis: Axis, prices: CostCoefficients | None = None) -> Partitioned:
    """`module` with `axis` in every type, the cheapest way; raises Diagnostic where it cannot split what it is for."""
    module, found = take_apart(module, axis, possible)
    _check(module, axis, found)
    return solved(module, axis, found, prices or CostCoefficients())


def solved(
    module: Module, axis: Axis, found: StrategySets, prices: CostCoefficients, inputs_split: bool = False
) -> Partitioned:
    """`module` with `axis` in every type, the cheapest way among what was found possible."""
    pricing = LayoutCosts(prices, module.mesh, axis.size)
    asked = problem(module, found, pricing, inputs_split)
    solution = _Solution(asked, solve(asked, pricing))
    plan: dict[Op, Strategy] = {}
    functions = tuple(_spelled(function, module, solution, plan) for function in module.functions)
    spelled = Module(functions, module.mesh)
    main = module.main
    results = {(v, main.result_role(i)): solution.of_result(i) for i, v in enumerate(main.results)}

    def choose(
        function: Function, index: int, versions: Sequence[Versions], candidates: Sequence[Strategy]
    ) -> Strategy:
        return plan[function.ops[index]]

    def finished(role: Role, value: Value, state: State) -> State:
        return results[value, role]

    inputs = tuple(solution.of_param(value) for value in main.params)
    return partition(spelled, axis, inputs, finished, choose, lambda f: tuple(solution.of_param(v) for v in f.params))


@dataclass(frozen=True, slots=True)
class _Solution:
    problem: Problem
    taken: dict[StrategyChoice, Strategy]

    def of_param(self, value: Value) -> State:
        return self.taken[self.problem.of_param[value]].results[0]

    def of_result(self, index: int) -> State:
        return self.taken[self.problem.of_result[index]].operands[0]


def _check(module: Module, axis: Axis, found: StrategySets) -> None:
    """Raises Diagnostic where attention, or every matrix product, would run unsplit on all ranks."""
    heavy = [op for function in module.functions for op in function.ops if kind_of(op) is Kind.HEAVY or is_ring(op)]
    stuck = [op for op in heavy if len(found.strategies[op]) == 1]
    asked = f"{axis.name}={axis.size}"
    heads = {next(op.inputs()).type.shape[1]: op for op in heavy if op.name in ATTENTION or is_ring(op)}
    for count, op in heads.items():
        if op in stuck:
            where = (
                f" of {op.loc.module}" if op.loc.module else f' at "{op.loc.file}":{op.loc.line}' if op.loc.file else ""
            )
            taken = [split.axis for split in next(op.inputs()).type.layout.on_dim(1)]
            if taken:
                raise Diagnostic(f"{asked} cannot split the {count} heads{where} once more: {taken[0]} splits them")
            would = [f"{axis.name}={n}" for n in range(2, count + 1) if all(h % n == 0 for h in heads)]
            raise Diagnostic(f"{asked} divides neither the {count} heads nor the rows{where}{alternatives(would)}")
    if len(stuck) == len(heavy):
        raise Diagnostic(
            f"{asked} cannot split any of the {len(heavy)} matrix products of @{module.main.name}: "
            f"no dim of a weight divides by {axis.size} and can stay split through them"
        )


def alternatives(would: Sequence[str]) -> str:
    if not would:
        return "; no other size would"
    return "; " + (f"{', '.join(would[:-1])} or {would[-1]}" if len(would) > 1 else would[0]) + " would"


def _spelled(function: Function, module: Module, solution: _Solution, plan: dict[Op, Strategy]) -> Function:
    """`function` with every view that was no choice made once per state in which it is read; `plan` gains its ops."""
    return _Speller(module, solution, plan, function).run()


class _Speller:
    def __init__(self, module: Module, solution: _Solution, plan: dict[Op, Strategy], function: Function) -> None:
        self.module = module
        self.solution = solution
        self.problem = solution.problem
        self.plan = plan
        self.old = function
        self.views = {op.results[0]: op for op in function.ops if op in self.problem.pulls}
        self.ops: list[Op] = []
        self.made: dict[tuple[Value, State], Value] = {}

    def run(self) -> Function:
        for op in self.old.ops:
            if op not in self.problem.pulls:
                self._op(op)
        return replace(self.old, ops=tuple(self.ops))

    def _op(self, op: Op) -> None:
        if op.name == "call":
            states = [self.solution.of_param(param) for param in self.module.function(op.callee).params]
            self.ops.append(self._reading(op, states))
            return
        choice = self.problem.of_op.get(op)
        strategy = rule_of(op).replicated() if choice is None else self.solution.taken[choice]
        new = self._reading(op, strategy.operands)
        self.ops.append(new)
        self.plan[new] = strategy

    def _reading(self, op: Op, states: Sequence[State]) -> Op:
        """`op` reading each operand in the state given for it."""
        wanted = iter(states)
        return replace(op, operands=tuple(self._operand(operand, wanted) for operand in op.operands))

    def _operand(self, operand: Operand, wanted: Iterator[State]) -> Operand:
        if isinstance(operand, tuple):
            return tuple(None if value is None else self._read(value, next(wanted)) for value in operand)
        return None if operand is None else self._read(operand, next(wanted))

    def _read(self, value: Value, state: State) -> Value:
        """`value` as something that wants it in a state reads it."""
        view = self.views.get(value)
        if view is None:
            return value
        if (value, state) not in self.made:
            pulled = self.problem.pulls[view][state]
            (source,) = view.inputs()
            new = Value(value.type, value.name)
            op = replace(view, operands=(self._read(source, pulled),), results=(new,))
            self.ops.append(op)
            self.plan[op] = Strategy((pulled,), (state,))
            self.made[value, state] = new
        return self.made[value, state]
