"""Put the axis `tp` into a module: layouts inside functions are chosen by an exact solver, from prices alone.

What people call tensor parallelism, with sequence-split norms and residuals, is what comes out where links are fast
enough. The batch is not split: that is what `dp` is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Role, Value, substitute
from moaic.ir.layout import WHOLE, Mesh, State
from moaic.ir.ops import Kind, kind_of, rule_of
from moaic.ir.rules import Strategy
from moaic.passes.annotate import Annotated, Axis, Versions, annotate
from moaic.passes.solver_linear import solve
from moaic.passes.solver_prices import Prices, Pricing
from moaic.passes.solver_problem import Choice, Problem, problem
from moaic.passes.solver_states import Possible, possible

ATTENTION = frozenset({"moai.sdpa", "moai.sdpa_backward"})


def follow_tensor(module: Module, axis: Axis, prices: Prices | None = None) -> Annotated:
    """`module` with `axis` in every type, in the cheapest way; raises Diagnostic where it cannot split what it is for."""
    found = possible(module, axis)
    _check(module, axis, found)
    pricing = Pricing(prices or Prices(), module.mesh, axis.size)
    asked = problem(module, Mesh((*module.mesh.axes, (axis.name, axis.size))), found, pricing)
    solution = _Solution(asked, solve(asked, pricing))
    plan: dict[Op, Strategy] = {}
    functions = tuple(_spelled(function, module, solution, plan) for function in module.functions)
    spelled = Module(functions, module.mesh)
    main = module.main
    results = {(v, main.result_role(i)): solution.of_result(i) for i, v in enumerate(main.results)}

    def choose(function: Function, index: int, versions: Sequence[Versions], candidates: Sequence[Strategy]) -> Strategy:  # noqa: ARG001
        op = function.ops[index]
        return plan.get(op) or rule_of(op).replicated()

    def finished(role: Role, value: Value, state: State) -> State:  # noqa: ARG001
        return results[value, role]

    inputs = tuple(solution.of_param(value) for value in main.params)
    return annotate(spelled, axis, inputs, finished, choose, lambda f: tuple(solution.of_param(v) for v in f.params))


@dataclass(frozen=True, slots=True)
class _Solution:
    problem: Problem
    taken: dict[Choice, Strategy]

    def of_param(self, value: Value) -> State:
        return self.taken[self.problem.of_param[value]].results[0]

    def of_result(self, index: int) -> State:
        return self.taken[self.problem.of_result[index]].operands[0]


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
            params = self.module.function(op.callee).params
            wanted = {value: self.solution.of_param(param) for value, param in zip(op.inputs(), params, strict=True)}
            pairs = list(wanted.items())
        else:
            choice = self.problem.of_op.get(op)
            strategy = self.solution.taken[choice] if choice is not None else rule_of(op).replicated()
            pairs = list(zip(op.inputs(), strategy.operands, strict=True))
            
        self.ops.append(op)

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
