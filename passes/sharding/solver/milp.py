"""Solve a layout problem exactly: a linear program first, integers only if its solution has fractions.

Variables are shares of strategies. Between the producer of a value and each use, shares flow from the states made to
the states wanted; a resharding costs the largest share that any use carries over it, so that uses share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moaic.ir.layout import State
from moaic.ir.rules import Strategy
from moaic.passes.sharding.solver.costs import LayoutCosts
from moaic.passes.sharding.solver.problem import Flow, Problem, StrategyChoice, Use

Shares = tuple[int, ...]
"""Variables that are added up."""

Solution = NDArray[np.float64]

TIME_LIMIT = 20.0
"""Seconds after which the best solution found is taken."""

GAP = 1e-4
"""Relative distance to the optimum that is close enough."""

SCALE = 1e3
"""The largest cost as the solver sees it: seconds are too small for its tolerances."""

FRACTION = 1e-6
"""A share further than this from a whole number is a fraction."""


def solve(problem: Problem, costs: LayoutCosts) -> dict[StrategyChoice, Strategy]:
    """The cheapest strategy of every choice together."""
    return _Program(costs).solve(problem)


@dataclass(slots=True)
class _Program:
    layout_costs: LayoutCosts
    costs: list[float] = field(default_factory=list[float])
    rows: list[dict[int, float]] = field(default_factory=list[dict[int, float]])
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])
    first: dict[StrategyChoice, int] = field(default_factory=dict[StrategyChoice, int])

    def solve(self, problem: Problem) -> dict[StrategyChoice, Strategy]:
        for choice in problem.choices:
            self.first[choice] = len(self.costs)
            shares = tuple(self._variable(cost) for cost in choice.costs)
            self._row([(shares, 1.0)], 1.0, 1.0)
        count = len(self.costs)
        for flow in problem.flows:
            self._flow(flow)
        x = self._optimum(count)
        return {
            choice: choice.strategies[int(np.argmax(x[start : start + len(choice.costs)]))]
            for choice, start in self.first.items()
        }

    def _variable(self, cost: float) -> int:
        self.costs.append(cost)
        return len(self.costs) - 1

    def _row(self, terms: Sequence[tuple[Shares, float]], low: float, high: float) -> None:
        row: dict[int, float] = {}
        for shares, factor in terms:
            for variable in shares:
                row[variable] = row.get(variable, 0.0) + factor
        self.rows.append(row)
        self.low.append(low)
        self.high.append(high)

    def _flow(self, flow: Flow) -> None:
        made = self._made(flow)
        carried: list[dict[tuple[State, State], Shares]] = []
        seen: set[tuple[tuple[State, Shares], ...]] = set()
        for use in flow.uses:
            wanted = self._wanted(use)
            key = tuple(wanted.items())
            if key in seen:
                continue
            seen.add(key)
            carried.append(self._carry(flow, made, wanted))
        self._pay(flow, carried)

    def _made(self, flow: Flow) -> dict[State, Shares]:
        return self._by_state(flow.choice, [strategy.results[flow.result] for strategy in flow.choice.strategies])

    def _wanted(self, use: Use) -> dict[State, Shares]:
        return self._by_state(use.choice, [use.wanted(strategy) for strategy in use.choice.strategies])

    def _by_state(self, choice: StrategyChoice, states: Sequence[State]) -> dict[State, Shares]:
        shares: dict[State, Shares] = {}
        for index, state in enumerate(states):
            shares[state] = (*shares.get(state, ()), self.first[choice] + index)
        return shares

    def _carry(
        self, flow: Flow, made: Mapping[State, Shares], wanted: Mapping[State, Shares]
    ) -> dict[tuple[State, State], Shares]:
        """Shares carried from each state made to each state wanted."""
        carried: dict[tuple[State, State], Shares] = {}
        if len(made) == 1 or len(wanted) == 1:
            pairs = {(have, want): made[have] if len(wanted) == 1 else wanted[want] for have in made for want in wanted}
            for (have, want), shares in pairs.items():
                if self._cost(flow, have, want) is None:
                    self._row([(shares, 1.0)], 0.0, 0.0)
                else:
                    carried[have, want] = shares
            return carried
        for have in made:
            for want in wanted:
                if self._cost(flow, have, want) is not None:
                    carried[have, want] = (self._variable(0.0),)
        for have, shares in made.items():
            self._row([(shares, -1.0), *((c, 1.0) for (h, _), c in carried.items() if h == have)], 0.0, 0.0)
        for want, shares in wanted.items():
            self._row([(shares, -1.0), *((c, 1.0) for (_, w), c in carried.items() if w == want)], 0.0, 0.0)
        return carried

    def _cost(self, flow: Flow, have: State, want: State) -> float | None:
        return self.layout_costs.resharding(flow.value, have, want, flow.role)

    def _pay(self, flow: Flow, carried: Sequence[Mapping[tuple[State, State], Shares]]) -> None:
        over: dict[tuple[State, State], list[Shares]] = {}
        for by_states in carried:
            for pair, shares in by_states.items():
                over.setdefault(pair, []).append(shares)
        for (have, want), readers in over.items():
            cost = self._cost(flow, have, want)
            if not cost:
                continue
            if len(readers) == 1:
                for variable in readers[0]:
                    self.costs[variable] += flow.weight * cost
                continue
            shared = self._variable(flow.weight * cost)
            for shares in readers:
                self._row([((shared,), 1.0), (shares, -1.0)], 0.0, np.inf)

    def _optimum(self, count: int) -> Solution:
        """Shares of all strategies, `count` variables; the others follow from them."""
        shares = self._minimize(0)[:count]
        if np.abs(shares - shares.round()).max(initial=0.0) > FRACTION:
            shares = self._minimize(count)[:count]
        return shares

    def _minimize(self, integers: int) -> Solution:
        """The cheapest solution in which the first `integers` variables are integers."""
        # Here and not above: only a plan with this axis pays for the import.
        from scipy.optimize import Bounds, LinearConstraint, milp  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
        from scipy.sparse import csr_array  # pyright: ignore[reportMissingTypeStubs]

        costs = np.array(self.costs)
        entries = [(i, column, factor) for i, row in enumerate(self.rows) for column, factor in row.items()]
        rows, columns, factors = zip(*entries, strict=True)
        matrix = csr_array((factors, (rows, columns)), shape=(len(self.rows), len(costs)))
        low, high = np.array(self.low), np.array(self.high)
        constraints = LinearConstraint(matrix, low, high)  # pyright: ignore[reportArgumentType]
        result: Any = milp(
            costs * (SCALE / (costs.max(initial=0.0) or 1.0)),
            integrality=np.arange(len(costs)) < integers,
            bounds=Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": TIME_LIMIT, "mip_rel_gap": GAP},
        )
        assert result.x is not None, f"the layout problem has no solution: {result.message}"
        return result.x
