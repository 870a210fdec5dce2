"""Put the axis `tp` into a module: an exact solver selects the layouts inside functions, by cost alone.

Tensor parallelism with sequence-sharded norms and residuals is its solution where links are fast enough. The batch is
not sharded: `dp` does that.
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
from moaic.passes.sharding.axis import Axis, MaterializedStates
from moaic.passes.sharding.partitioner import Partitioned, partition
from moaic.passes.sharding.solver.costs import CostCoefficients, LayoutCosts
from moaic.passes.sharding.solver.milp import solve
from moaic.passes.sharding.solver.problem import Problem, StrategyChoice, problem
from moaic.passes.sharding.solver.strategy_sets import StrategySets, find_strategies
from moaic.passes.sharding.split_reductions import decompose


@dataclass(frozen=True, slots=True)
class TensorParallel:
    name: ClassVar[str] = "tp"
    summary: ClassVar[str] = "shard tensors along the dims that the solver selects"
    ranks: int = 2
    coefficients: CostCoefficients = CostCoefficients()

    def apply(self, module: Module) -> Module:
        return shard_tensors(module, Axis(self.name, self.ranks), self.coefficients).module


def shard_tensors(module: Module, axis: Axis, coefficients: CostCoefficients) -> Partitioned:
    """`module` with `axis` in every type at least cost.

    Raises Diagnostic where no matrix product, or no attention, can be sharded.
    """
    module, sets = decompose(module, axis, find_strategies)
    _check(module, axis, sets)
    return solved(module, axis, sets, coefficients)


def solved(
    module: Module, axis: Axis, sets: StrategySets, coefficients: CostCoefficients, inputs_sharded: bool = False
) -> Partitioned:
    """`module` with `axis` in every type at least cost among `sets`; inputs may be sharded if `inputs_sharded`."""
    costs = LayoutCosts(coefficients, module.mesh, axis.size)
    layout_problem = problem(module, sets, costs, inputs_sharded)
    solution = _Solution(layout_problem, solve(layout_problem, costs))
    plan: dict[Op, Strategy] = {}
    functions = tuple(_views_copied(function, module, solution, plan) for function in module.functions)
    copied = Module(functions, module.mesh)
    main = module.main
    results = {(v, main.result_role(i)): solution.of_result(i) for i, v in enumerate(main.results)}

    def select(
        function: Function, index: int, operands: Sequence[MaterializedStates], candidates: Sequence[Strategy]
    ) -> Strategy:
        return plan[function.ops[index]]

    def result_state(role: Role, value: Value, state: State) -> State:
        return results[value, role]

    states = {param: solution.of_param(value) for param, value in zip(copied.main.params, main.params, strict=True)}
    return partition(
        copied, axis, states, result_state, select, lambda f: tuple(solution.of_param(v) for v in f.params)
    )


@dataclass(frozen=True, slots=True)
class _Solution:
    problem: Problem
    selected: dict[StrategyChoice, Strategy]

    def of_param(self, value: Value) -> State:
        return self.selected[self.problem.of_param[value]].results[0]

    def of_result(self, index: int) -> State:
        return self.selected[self.problem.of_result[index]].operands[0]


def _check(module: Module, axis: Axis, sets: StrategySets) -> None:
    """Raises Diagnostic where attention, or every matrix product, would run unsharded on all ranks."""
    heavy = [op for function in module.functions for op in function.ops if kind_of(op) is Kind.HEAVY or is_ring(op)]
    stuck = [op for op in heavy if len(sets.strategies[op]) == 1]
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


def _views_copied(function: Function, module: Module, solution: _Solution, plan: dict[Op, Strategy]) -> Function:
    """`function` with each pulled-back view copied per state in which it is read; `plan` gains the new ops."""
    return _ViewCopier(module, solution, plan, function).run()


class _ViewCopier:
    """Copies views without a choice of their own, once for each state in which they are read.

        %t = aten.permute %x {dims = [1, 0]} : f32[4, 8]    # one reader takes 8{tp}, another 4{tp}
    becomes
        %a = aten.permute %x {dims = [1, 0]} : f32[4, 8]    # read as 8{tp}: %x is wanted as 8{tp}
        %b = aten.permute %x {dims = [1, 0]} : f32[4, 8]    # read as 4{tp}: %x is wanted as 4{tp}
    """

    def __init__(self, module: Module, solution: _Solution, plan: dict[Op, Strategy], function: Function) -> None:
        self.module = module
        self.solution = solution
        self.problem = solution.problem
        self.plan = plan
        self.old = function
        self.views = {op.results[0]: op for op in function.ops if op in self.problem.pulls}
        self.ops: list[Op] = []
        self.copies: dict[tuple[Value, State], Value] = {}

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
        strategy = rule_of(op).replicated() if choice is None else self.solution.selected[choice]
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
        """`value`, or the copy of the view that makes it, for a reader that takes it in `state`."""
        view = self.views.get(value)
        if view is None:
            return value
        if (value, state) not in self.copies:
            pulled = self.problem.pulls[view][state]
            (source,) = view.inputs()
            new = Value(value.type, value.name)
            op = replace(view, operands=(self._read(source, pulled),), results=(new,))
            self.ops.append(op)
            self.plan[op] = Strategy((pulled,), (state,))
            self.copies[value, state] = new
        return self.copies[value, state]
