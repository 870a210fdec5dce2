"""Put the axis `cp` into a module: the sequence is split, attention included.

What each rank needs of other positions comes to it in one of three ways, and the solver picks the cheapest: keys and
values gathered for its own rows of queries, an exchange of rows for heads before and after attention, or blocks of
keys and values that go round in a ring. A ring sends no less than gathers do, but holds two blocks at a time, never
all keys: a plan for little memory is asked to gather none (`gather_keys=false`).

The work of a causal flag is balanced: every rank has as many rows with all their keys, under a mask that skips
nothing; or whole rows for its heads; or, in a ring, every n-th row of the sequence, which then lies in such stripes
from the tokens to the loss. Weights are not split: that is what `tp` is for.
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
from moaic.passes.sharding.partitioner import Axis, Partitioned
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.solver.problem import weight_values
from moaic.passes.sharding.solver.strategy_sets import StrategySets, possible
from moaic.passes.sharding.split_reductions import take_apart
from moaic.passes.sharding.tensor_parallel import alternatives, solved


@dataclass(frozen=True, slots=True)
class SplitSequence:
    name: ClassVar[str] = "cp"
    summary: ClassVar[str] = "split the sequence; keys may be gathered or not; ranks of tp that share its heads"
    ranks: int = 2
    gather_keys: bool = True
    tp: int = field(default=1, metadata={AT_LEAST: 1})
    prices: CostCoefficients = CostCoefficients()

    def apply(self, module: Module) -> Module:
        axis = Axis(self.name, self.ranks)
        return follow_context(module, axis, self.prices, self.gather_keys, self.tp).module


def follow_context(
    module: Module, axis: Axis, prices: CostCoefficients | None = None, gather_keys: bool = True, tp: int = 1
) -> Partitioned:
    """`module` with its sequence split over `axis`; raises Diagnostic where there is none that divides.

    Without `gather_keys` no rank has all keys and values of attention at once, unless for some of its heads alone.
    Heads are exchanged for rows so that weights, and heads with them, still fall into `tp` parts.
    """
    rows = _rows(module, axis)
    module, found = take_apart(module, axis, partial(_possible, tp=tp, rows=rows))
    found = _used(module, axis, found)
    if not gather_keys:
        found = _without_gathers(module, axis, found)
    return solved(module, axis, found, prices or CostCoefficients(), inputs_split=True)


def _possible(module: Module, axis: Axis, tp: int, rows: frozenset[int]) -> StrategySets:
    """What rules allow, and rings."""
    found = possible(module, axis, partial(_seeds, tp=tp, wanted=rows), weight_values)
    strategies = dict(found.strategies)
    for op in _attention(module):
        *others, replicated = strategies[op]
        rings = (ring for ring in rings_for(op, axis.size) if _is_reached(op, ring, found))
        strategies[op] = (*others, *rings, replicated)
    return replace(found, strategies=strategies)


def _is_reached(op: Op, strategy: Strategy, found: StrategySets) -> bool:
    """Whether the values of an op may lie as the strategy says."""
    pairs = zip((*op.inputs(), *op.results), (*strategy.operands, *strategy.results), strict=True)
    return all(state == REPLICATED or state in found.splits.get(value, ()) for value, state in pairs)


def _without_gathers(module: Module, axis: Axis, found: StrategySets) -> StrategySets:
    """`found` with attention only where keys lie in parts; raises Diagnostic where some must have them whole."""
    strategies = dict(found.strategies)
    for op in _attention(module):
        key_at = query_at(op) + 1
        strategies[op] = tuple(each for each in strategies[op] if each.operands[key_at] != REPLICATED)
        if not strategies[op]:
            where, heads = f" of {op.loc.module}" if op.loc.module else "", op.results[0].type.shape[1]
            raise Diagnostic(
                f"gather_keys=false leaves {axis.name}={axis.size} no way for attention{where}: it splits neither "
                f"its {heads} heads nor its rows and keys alike"
            )
    return replace(found, strategies=strategies)


def lengths(module: Module) -> list[int]:
    """Lengths of sequences: rows and columns of attention, and tokens in a row of the batch.

    Attention with dropout is spelled out: a softmax over as many keys as a row of the batch has vectors.
    """
    found: dict[int, None] = {}
    keys = {op.results[0].type.shape[-1] for op in _softmaxes(module)}
    for index, value in enumerate(module.main.params):
        shape = value.type.shape
        of_tokens = value.type.dtype == "i64" and len(shape) == 2
        of_vectors = value.type.dtype in FLOATING and len(shape) == 3 and shape[1] in keys
        if module.main.param_role(index).kind == "input" and (of_tokens or of_vectors):
            found[shape[1]] = None
    for op in _attention(module):
        found.update(dict.fromkeys(value.type.shape[2] for value in query_key_value(op)))
    return [length for length in found if length > 1]


def _attention(module: Module) -> Iterator[Op]:
    return (op for function in module.functions for op in function.ops if op.name in ATTENTION)


def _softmaxes(module: Module) -> Iterator[Op]:
    """Those of matrices."""
    ops = (op for function in module.functions for op in function.ops if op.name == "aten._softmax")
    return (op for op in ops if len(op.results[0].type.shape) >= 3)


def _rows(module: Module, axis: Axis) -> frozenset[int]:
    """The lengths of sequences; raises Diagnostic where the axis divides none."""
    asked = f"{axis.name}={axis.size}"
    found = lengths(module)
    if not found:
        raise Diagnostic(
            f"{asked} splits the sequence, and @{module.main.name} has none: no attention, no rows of tokens"
        )
    if all(length % axis.size for length in found):
        most = max(found)
        would = [f"{axis.name}={n}" for n in range(2, most + 1) if any(length % n == 0 for length in found)]
        raise Diagnostic(f"{asked} does not divide a sequence of {most}{alternatives(would)}")
    return frozenset(found)


def _seeds(module: Module, axis: Axis, tp: int, wanted: frozenset[int]) -> Iterator[tuple[Value, State]]:
    """The sequence in the inputs and in attention, also in stripes where these balance it; the heads of attention."""
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


def _used(module: Module, axis: Axis, found: StrategySets) -> StrategySets:
    """`found` with every heavy op split that can be: an axis that was asked for is used, however small the model."""
    strategies = dict(found.strategies)
    heavy = [op for op in strategies if kind_of(op) is Kind.HEAVY]
    for op in heavy:
        strategies[op] = strategies[op][:-1] or strategies[op]
    if all(len(found.strategies[op]) == 1 for op in heavy):
        raise Diagnostic(
            f"{axis.name}={axis.size} can split none of the {len(heavy)} matrix products of @{module.main.name} "
            f"along the sequence"
        )
    return replace(found, strategies=strategies)
