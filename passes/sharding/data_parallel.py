"""Follow what is already split: the greedy chooser that carries `mb` and `dp` from the batch dim through the graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Role, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Sharded, State
from moaic.ir.rules import Strategy
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.sharding.partitioner import Axis, Partitioned, Versions, barrier, function_flops, partition
from moaic.passes.sharding.solver.strategy_sets import possible
from moaic.passes.sharding.split_reductions import extremes_apart

PRE_LIMIT = 0.05
"""Share of the step's FLOPs that may run on the unsplit batch before the first micro-batch."""


@dataclass(frozen=True, slots=True)
class SplitInTime:
    name: ClassVar[str] = MICRO_BATCHES
    summary: ClassVar[str] = "split the batch in time"
    parts: int = 2

    def apply(self, module: Module) -> Module:
        return follow_time(module, Axis(self.name, self.parts, is_loop=True)).module


@dataclass(frozen=True, slots=True)
class SplitInSpace:
    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = "split the batch in space"
    ranks: int = 2

    def apply(self, module: Module) -> Module:
        return follow_space(module, Axis(self.name, self.ranks)).module


def batch_size(function: Function) -> int:
    """Rows of the batch: the first dim of the first input that has one."""
    for index, value in enumerate(function.params):
        if function.param_role(index).kind == "input" and value.type.shape and value.type.dtype != "bool":
            return value.type.shape[0]
    return 1


def carriers(function: Function) -> frozenset[Value]:
    """The inputs and tangents that carry the batch in dim 0."""
    rows = batch_size(function)
    kinds = [function.param_role(index).kind for index in range(len(function.params))]
    pairs = zip(function.params, kinds, strict=True)
    return frozenset(value for value, kind in pairs if kind in ("input", "tangent") and value.type.shape[:1] == (rows,))


def batch_states(module: Module, axis: Axis) -> tuple[State, ...]:
    """Inputs that carry the batch in dim 0 split over it (inside micro-batches, if there are any), all else whole."""
    rows = batch_size(module.main)
    parts = module.mesh.size(MICRO_BATCHES) * axis.size
    if rows % parts:
        raise Diagnostic(f"{axis.name}={axis.size}: a batch of {rows} does not divide into {parts} equal parts")

    carrying = carriers(module.main)
    return tuple(Sharded(0, rows // parts) if value in carrying else REPLICATED for value in module.main.params)


def follow_space(module: Module, axis: Axis) -> Partitioned:
    """`module` with the batch split over `axis`; what is whole on one device ends whole on every rank."""
    states = batch_states(module, axis)
    module = extremes_apart(module, axis, lambda module, axis: possible(module, axis, _batch))
    return partition(module, axis, states, _finished, cheapest_in_space)


def _batch(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
    return zip(module.main.params, batch_states(module, axis), strict=True)


def follow_time(module: Module, axis: Axis) -> Partitioned:
    """`module` in micro-batches; raises Barrier where much of the step would have to run unsplit first."""
    total = function_flops(module, module.main)
    most = PRE_LIMIT * total
    found = partition(module, axis, batch_states(module, axis), _finished, cheapest_in_time, most_early=most)
    if found.pre_op is not None and found.pre_flops > most:
        share = 100 * found.pre_flops / total
        raise barrier(axis, found.pre_op, f"making that takes {share:.0f} % of the step's FLOPs again")
    return found


def _finished(role: Role, value: Value, state: State) -> State:
    """Outputs may stay split; nothing rests as a pending sum; gradients and updates lie as what they belong to."""
    if state == PARTIAL or role.kind in ("grad", "update"):
        return REPLICATED
    return state


def cheapest_in_space(
    function: Function, index: int, versions: Sequence[Versions], candidates: Sequence[Strategy]
) -> Strategy:
    """The strategy that moves the fewest bytes; of equals, the one that splits most."""
    inputs = list(function.ops[index].inputs())

    def price(strategy: Strategy) -> tuple[float, int]:
        moved = sum(
            min(_bytes_moved(value, have, want) for have in available)
            for value, available, want in zip(inputs, versions, strategy.operands, strict=True)
        )
        return moved, -sum(state != REPLICATED for state in strategy.results)

    return min(candidates, key=price)


def _bytes_moved(value: Value, have: State, want: State) -> float:
    """Bytes that a conversion sends, in units that only order strategies."""
    size = float(value.type.nbytes())
    if have == want:
        return 0.0
    if have == REPLICATED:
        return 1e-3
    if want == PARTIAL:
        return 1e18
    return 2 * size if have == PARTIAL and want == REPLICATED else size


_EARLY = 1e6
_UNSPLIT = 1e9


def cheapest_in_time(
    function: Function, index: int, versions: Sequence[Versions], candidates: Sequence[Strategy]
) -> Strategy:
    """The strategy for which the least must be done before the first part or after the last."""

    def price(strategy: Strategy) -> float:
        late = all(state == REPLICATED for state in strategy.operands)
        return sum(
            min(_time_price(have, want, late) for have in available)
            for available, want in zip(versions, strategy.operands, strict=True)
        )

    return min(candidates, key=price)


def _time_price(have: State, want: State, late: bool) -> float:
    """A part or a finished sum costs nothing more; what must be whole early, or split after the end, costs a rerun."""
    if have == want or (have == REPLICATED and want != PARTIAL):
        return 0.0
    if late:
        return _UNSPLIT if isinstance(have, Sharded) else 1.0 if have == PARTIAL else 0.0
    return _EARLY
