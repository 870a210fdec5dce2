"""Put the axis `cp` into a module: the sequence is sharded, attention included.

Attention of a rank reads other positions in one of three ways, and the solver selects the cheapest: keys and values
are gathered for the rank's rows of queries; rows are exchanged for heads before and after attention (all-to-all); or
blocks of keys and values go round in a ring. A ring sends no less than gathers do, but holds two blocks at a time,
never all keys: `gather_keys=false` asks for a plan of less memory.

Causal attention is balanced: every rank has equally many rows with all their keys, under a mask that skips nothing; or
all rows of its heads; or, in a ring, every n-th row of the sequence, which is then striped from the tokens to the
loss. Weights are not sharded: `tp` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from moaic.ir.attention import ATTENTION, is_causal, query_at, query_key_value
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Op, Value
from moaic.ir.layout import REPLICATED, Sharded, State
from moaic.ir.ops import Kind, kind_of
from moaic.ir.ring_attention import rings_for
from moaic.ir.rules import Strategy
from moaic.ir.types import FLOATING
from moaic.passes.pass_options import AT_LEAST
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.partitioner import Partitioned
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.solver.problem import weight_values
from moaic.passes.sharding.solver.strategy_sets import StrategySets, find_strategies
from moaic.passes.sharding.split_reductions import decompose
from moaic.passes.sharding.tensor_parallel import alternatives, solved


@dataclass(frozen=True, slots=True)
class ContextParallel:
    name: ClassVar[str] = "cp"
    summary: ClassVar[str] = (
        "shard the sequence; then whether keys may be gathered, and the ranks of tp that share its heads"
    )
    ranks: int = 2
    gather_keys: bool = True
    tp: int = field(default=1, metadata={AT_LEAST: 1})
    coefficients: CostCoefficients = CostCoefficients()

    def apply(self, module: Module) -> Module:
        axis = Axis(self.name, self.ranks)
        return shard_sequence(module, axis, self.coefficients, self.gather_keys, self.tp).module


def shard_sequence(
    module: Module, axis: Axis, coefficients: CostCoefficients, gather_keys: bool = True, tp: int = 1
) -> Partitioned:
    """`module` with its sequence sharded over `axis`; raises Diagnostic where no sequence divides.

    Without `gather_keys` no rank holds all keys and values of attention at once, except of its own heads. Rows are
    exchanged for heads only where the heads still divide by `tp`.
    """
    rows = _rows(module, axis)
    module, sets = decompose(module, axis, partial(_strategies, tp=tp, rows=rows))
    sets = _heavy_ops_sharded(module, axis, sets)
    if not gather_keys:
        sets = _without_gathers(module, axis, sets)
    return solved(module, axis, sets, coefficients, inputs_sharded=True)


def _strategies(module: Module, axis: Axis, tp: int, rows: frozenset[int]) -> StrategySets:
    """The strategies that rules allow, and rings."""
    sets = find_strategies(module, axis, partial(_seed_shardings, tp=tp, wanted=rows), weight_values)
    strategies = dict(sets.strategies)
    for op in _attention(module):
        *others, replicated = strategies[op]
        rings = (ring for ring in rings_for(op, axis.size) if _is_reached(op, ring, sets))
        strategies[op] = (*others, *rings, replicated)
    return replace(sets, strategies=strategies)


def _is_reached(op: Op, strategy: Strategy, sets: StrategySets) -> bool:
    """Whether every value of the op may be in the state that the strategy gives it."""
    pairs = zip((*op.inputs(), *op.results), (*strategy.operands, *strategy.results), strict=True)
    return all(state == REPLICATED or state in sets.splits.get(value, ()) for value, state in pairs)


def _without_gathers(module: Module, axis: Axis, sets: StrategySets) -> StrategySets:
    """`sets` without attention on replicated keys; raises Diagnostic where some attention has no other strategy."""
    strategies = dict(sets.strategies)
    for op in _attention(module):
        key_index = query_at(op) + 1
        strategies[op] = tuple(strategy for strategy in strategies[op] if strategy.operands[key_index] != REPLICATED)
        if not strategies[op]:
            where, heads = f" of {op.loc.module}" if op.loc.module else "", op.results[0].type.shape[1]
            raise Diagnostic(
                f"{axis.name}={axis.size} with gather_keys=false cannot shard attention{where}: "
                f"neither its {heads} heads nor its sequence can be sharded by {axis.size}"
            )
    return replace(sets, strategies=strategies)


def lengths(module: Module) -> list[int]:
    """Lengths of sequences: rows and columns of attention, and tokens in a row of the batch.

    Attention with dropout is spelled out: a softmax over as many keys as a row of the batch has vectors.
    """
    sizes: dict[int, None] = {}
    keys = {op.results[0].type.shape[-1] for op in _softmaxes(module)}
    for index, value in enumerate(module.main.params):
        shape = value.type.shape
        of_tokens = value.type.dtype == "i64" and len(shape) == 2
        of_vectors = value.type.dtype in FLOATING and len(shape) == 3 and shape[1] in keys
        if module.main.param_role(index).kind == "input" and (of_tokens or of_vectors):
            sizes[shape[1]] = None
    for op in _attention(module):
        sizes.update(dict.fromkeys(value.type.shape[2] for value in query_key_value(op)))
    return [length for length in sizes if length > 1]


def _attention(module: Module) -> Iterator[Op]:
    return (op for function in module.functions for op in function.ops if op.name in ATTENTION)


def _softmaxes(module: Module) -> Iterator[Op]:
    """Softmaxes of tensors of three or more dims: attention that is spelled out."""
    ops = (op for function in module.functions for op in function.ops if op.name == "aten._softmax")
    return (op for op in ops if len(op.results[0].type.shape) >= 3)


def _rows(module: Module, axis: Axis) -> frozenset[int]:
    """The lengths of sequences; raises Diagnostic where the axis divides none."""
    asked = f"{axis.name}={axis.size}"
    sizes = lengths(module)
    if not sizes:
        raise Diagnostic(
            f"{asked} splits the sequence, and @{module.main.name} has none: no attention, no rows of tokens"
        )
    if all(length % axis.size for length in sizes):
        most = max(sizes)
        would = [f"{axis.name}={n}" for n in range(2, most + 1) if any(length % n == 0 for length in sizes)]
        raise Diagnostic(f"{asked} does not divide a sequence of {most}{alternatives(would)}")
    return frozenset(sizes)


def _seed_shardings(module: Module, axis: Axis, tp: int, wanted: frozenset[int]) -> Iterator[tuple[Value, State]]:
    """The sequence in the inputs and in attention, striped too where that balances causal attention; the heads."""
    n = axis.size
    in_stripes = any(map(is_causal, _attention(module)))

    def rows(value: Value, dim: int) -> Iterator[tuple[Value, State]]:
        size = value.type.shape[dim]
        if size and size % n == 0:
            yield from ((value, Sharded(dim, stride)) for stride in ((size // n, 1) if in_stripes else (size // n,)))

    for index, value in enumerate(module.main.params):
        if module.main.param_role(index).kind in ("input", "tangent"):
            for dim in (dim for dim, size in enumerate(value.type.shape) if dim and size in wanted):
                yield from rows(value, dim)
    for op in _attention(module):
        for value in query_key_value(op)[:2]:
            heads = value.type.shape[1]
            if heads and heads % (n * tp) == 0:
                yield value, Sharded(1, heads // (n * tp))
            yield from rows(value, 2)


def _heavy_ops_sharded(module: Module, axis: Axis, sets: StrategySets) -> StrategySets:
    """`sets` with every heavy op sharded that can be: an axis that was asked for is used, however small the model."""
    strategies = dict(sets.strategies)
    heavy = [op for op in strategies if kind_of(op) is Kind.HEAVY]
    for op in heavy:
        strategies[op] = strategies[op][:-1] or strategies[op]
    if all(len(sets.strategies[op]) == 1 for op in heavy):
        raise Diagnostic(
            f"{axis.name}={axis.size} can split none of the {len(heavy)} matrix products of @{module.main.name} "
            f"along the sequence"
        )
    return replace(sets, strategies=strategies)
