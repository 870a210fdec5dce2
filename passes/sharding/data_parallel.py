"""Shard the batch over `dp`, or split it into micro-batches over `mb`.

A greedy strategy selector propagates the axis from dim 0 of the inputs: every op takes the strategy that costs least
given the states in which its operands exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Role, Value
from moaic.ir.layout import PARTIAL, REPLICATED, Sharded, State
from moaic.ir.op_names import REPEAT_LAST
from moaic.ir.rules import Strategy
from moaic.ir.sizes import Size
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.perf.flops import function_flops
from moaic.passes.sharding.axis import Axis, MaterializedStates, unshardable
from moaic.passes.sharding.partitioner import Partitioned, partition
from moaic.passes.sharding.solver.strategy_sets import find_strategies
from moaic.passes.sharding.split_reductions import decompose_extremes

EARLY_LIMIT = 0.05
"""Share of the step's FLOPs that may run on the unsharded batch before the first micro-batch."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    name: ClassVar[str] = MICRO_BATCHES
    summary: ClassVar[str] = "run the batch as micro-batches, one after another"
    parts: int = 2

    def apply(self, module: Module) -> Module:
        return split_into_micro_batches(module, Axis(self.name, self.parts, is_loop=True)).module


@dataclass(frozen=True, slots=True)
class DataParallel:
    name: ClassVar[str] = "dp"
    summary: ClassVar[str] = "shard the batch"
    ranks: int = 2

    def apply(self, module: Module) -> Module:
        return shard_batch(module, Axis(self.name, self.ranks)).module


def batch_size(function: Function) -> int:
    """Rows of the batch, padding among them: the first dim of the first input that has one."""
    for value in _padded(function):
        return value.type.shape[0]
    for index, value in enumerate(function.params):
        if function.param_role(index).kind == "input" and value.type.shape and value.type.dtype != "bool":
            return value.type.shape[0]
    return 1


def padded_rows(rows: int, parts: int) -> int:
    """The fewest rows, of at least so many, that fall into equal parts."""
    return -(-rows // parts) * parts


def _padded(function: Function) -> Iterator[Value]:
    """What the batch is padded to where it enters the step."""
    entering = frozenset(function.params)
    return (op.results[0] for op in function.ops if op.name == REPEAT_LAST and op.operands[0] in entering)


def carriers(function: Function) -> frozenset[Value]:
    """The inputs and tangents that carry the batch in dim 0, or what these are padded to."""
    if padded := frozenset(_padded(function)):
        return padded
    rows = batch_size(function)
    kinds = [function.param_role(index).kind for index in range(len(function.params))]
    pairs = zip(function.params, kinds, strict=True)
    return frozenset(value for value, kind in pairs if kind in ("input", "tangent") and value.type.shape[:1] == (rows,))


def batch_states(module: Module, axis: Axis) -> dict[Value, State]:
    """What carries the batch in dim 0 is sharded, within micro-batches where there are any; other inputs replicated."""
    rows = batch_size(module.main)
    parts = module.mesh.size(MICRO_BATCHES) * axis.size
    if rows % parts:
        raise Diagnostic(
            f"{axis.name}={axis.size}: a batch of {rows} does not divide into {parts} equal parts",
            hint="" if isinstance(rows, Size) else f"pad={padded_rows(rows, parts)}, as the first pass, adds rows",
        )

    states: dict[Value, State] = dict.fromkeys(module.main.params, REPLICATED)
    states.update(dict.fromkeys(carriers(module.main), Sharded(0, rows // parts)))
    return states


def shard_batch(module: Module, axis: Axis) -> Partitioned:
    """`module` with the batch sharded over `axis`; gradients and updates end replicated."""
    module = decomposed(module, axis)
    return partition(module, axis, batch_states(module, axis), _complete, cheapest_in_space)


def decomposed(module: Module, axis: Axis) -> Module:
    """`module` with every extreme decomposed that the batch, sharded over `axis`, would cut."""
    return decompose_extremes(module, axis, lambda module, axis: find_strategies(module, axis, _batch))


def _batch(module: Module, axis: Axis) -> Iterable[tuple[Value, State]]:
    return batch_states(module, axis).items()


def split_into_micro_batches(module: Module, axis: Axis) -> Partitioned:
    """`module` in micro-batches; raises UnshardableOp where much of the step would have to run unsharded first."""
    total = function_flops(module, module.main)
    most = EARLY_LIMIT * total
    result = partition(module, axis, batch_states(module, axis), _complete, cheapest_in_time, max_early_flops=most)
    if result.early_op is not None and result.early_flops > most:
        share = 100 * result.early_flops / total
        raise unshardable(axis, result.early_op, f"making that takes {share:.0f} % of the step's FLOPs again")
    return result


def _complete(role: Role, value: Value, state: State) -> State:
    """Outputs may stay sharded; no result stays partial; gradients and updates are replicated like their parameters."""
    if state == PARTIAL or role.kind in ("grad", "update"):
        return REPLICATED
    return state


def cheapest_in_space(
    function: Function, index: int, operands: Sequence[MaterializedStates], candidates: Sequence[Strategy]
) -> Strategy:
    """The strategy that sends the fewest bytes; of equals, the one that shards most results."""
    inputs = list(function.ops[index].inputs())

    def cost(strategy: Strategy) -> tuple[float, int]:
        moved = sum(
            min(_bytes_moved(value, have, want) for have in available)
            for value, available, want in zip(inputs, operands, strategy.operands, strict=True)
        )
        return moved, -sum(state != REPLICATED for state in strategy.results)

    return min(candidates, key=cost)


def _bytes_moved(value: Value, have: State, want: State) -> float:
    """Bytes that a resharding sends, in units that only order strategies."""
    size = float(value.type.nbytes())
    if have == want:
        return 0.0
    if have == REPLICATED:
        return 1e-3
    if want == PARTIAL:
        return 1e18
    return 2 * size if have == PARTIAL and want == REPLICATED else size


_EARLY = 1e6
"""Cost of an operand that must exist replicated before the loop."""
_UNSHARDED = 1e9
"""Cost of an op that runs unsharded on an operand that exists in parts."""


def cheapest_in_time(
    function: Function, index: int, operands: Sequence[MaterializedStates], candidates: Sequence[Strategy]
) -> Strategy:
    """The strategy for which the fewest ops run before the first part or after the last."""

    def cost(strategy: Strategy) -> float:
        is_replicated = all(state == REPLICATED for state in strategy.operands)
        return sum(
            min(_time_cost(have, want, is_replicated) for have in available)
            for available, want in zip(operands, strategy.operands, strict=True)
        )

    return min(candidates, key=cost)


def _time_cost(have: State, want: State, is_replicated: bool) -> float:
    """A shard or a complete sum costs nothing; a value needed replicated early, or sharded after the loop, a rerun."""
    if have == want or (have == REPLICATED and want != PARTIAL):
        return 0.0
    if is_replicated:
        return _UNSHARDED if isinstance(have, Sharded) else 1.0 if have == PARTIAL else 0.0
    return _EARLY
