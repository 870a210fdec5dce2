"""Put the axis `ep` into a module: experts are sharded, and each rank multiplies the tokens of its own experts.

Outside of the experts the rows of the batch are sharded, as `dp` shards them. Tokens are all-gathered to every rank, a
rank multiplies those routed to its experts, and the partial sums of each token are reduce-scattered: no size depends
on values, and no expert runs on a token that was not routed to it.

Between the two products of an expert only one rank owns a row. A leading dim of blocks, one per rank, expresses that: a
row is zero in all blocks but its own. It may pass through any elementwise op, since a product reads of each block only
the rows that belong to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Layout, Sharded, State, splits_dim
from moaic.ir.op_names import GROUPED_MM, GROUPED_OUTER
from moaic.ir.ops import Kind, attr_int, attr_ints, kind_of, rule_of
from moaic.ir.types import TensorType
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.data_parallel import batch_size, carriers
from moaic.passes.sharding.partitioner import Partitioned
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.solver.problem import weight_values
from moaic.passes.sharding.solver.strategy_sets import StrategySets, find_strategies
from moaic.passes.sharding.split_reductions import decompose
from moaic.passes.sharding.tensor_parallel import alternatives, solved


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    name: ClassVar[str] = "ep"
    summary: ClassVar[str] = "shard the experts and the batch"
    ranks: int = 2
    coefficients: CostCoefficients = CostCoefficients()

    def apply(self, module: Module) -> Module:
        return shard_experts(module, Axis(self.name, self.ranks), self.coefficients).module


def shard_experts(module: Module, axis: Axis, coefficients: CostCoefficients) -> Partitioned:
    """`module` with its experts sharded over `axis`; raises Diagnostic where it has none, or none that divide."""
    _check(module, axis)
    module, sets = decompose(in_blocks(module, axis.size), axis, _strategies)
    return solved(module, axis, _heavy_ops_sharded(sets), coefficients, inputs_sharded=True)


def experts_of(module: Module) -> list[int]:
    """Number of experts of each grouped product."""
    return [matrices_of(op).type.shape[0] for op in _grouped(module)]


def matrices_of(op: Op) -> Value:
    """The matrices that a product reads, or of which it makes the gradient."""
    if op.name == GROUPED_OUTER:
        return op.results[0]
    matrices = op.operands[1]
    assert isinstance(matrices, Value)
    return matrices


def _grouped(module: Module) -> list[Op]:
    return [op for function in module.functions for op in function.ops if op.name in (GROUPED_MM, GROUPED_OUTER)]


def _check(module: Module, axis: Axis) -> None:
    counts = experts_of(module)
    asked = f"{axis.name}={axis.size}"
    if not counts:
        raise Diagnostic(f"{asked} splits experts, and @{module.main.name} has none")
    if any(count % axis.size for count in counts):
        would = [f"{axis.name}={n}" for n in range(2, min(counts) + 1) if all(count % n == 0 for count in counts)]
        raise Diagnostic(f"{asked} does not divide {min(counts)} experts{alternatives(would)}")


def _strategies(module: Module, axis: Axis) -> StrategySets:
    """Strategies that shard experts and rows of the batch; other weights stay replicated."""
    alone = find_strategies(module, axis, _seed_experts)
    weights = weight_values(module) - {value for value, states in alone.splits.items() if states}

    def seed_shardings(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
        yield from _seed_experts(module, axis)
        yield from _seed_batch(module, axis)

    return find_strategies(module, axis, seed_shardings, lambda _: weights)


def _seed_experts(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
    for op in _grouped(module):
        matrices = matrices_of(op)
        yield matrices, Sharded(0, matrices.type.shape[0] // axis.size)


def _seed_batch(module: Module, axis: Axis) -> Iterator[tuple[Value, State]]:
    """Rows within what other axes have left of the batch, if they divide."""
    rows, parts = batch_size(module.main), module.mesh.ranks * axis.size
    if rows % parts == 0:
        yield from ((value, Sharded(0, rows // parts)) for value in carriers(module.main))


def _heavy_ops_sharded(sets: StrategySets) -> StrategySets:
    """`sets` with every heavy op sharded that can be, and grouped products along the experts alone."""
    strategies = dict(sets.strategies)
    for op, choices in sets.strategies.items():
        if op.name in (GROUPED_MM, GROUPED_OUTER):
            index = [*op.inputs(), *op.results].index(matrices_of(op))
            strategies[op] = tuple(s for s in choices if splits_dim((*s.operands, *s.results)[index], 0))
        elif kind_of(op) is Kind.HEAVY:
            strategies[op] = choices[:-1] or choices
    return replace(sets, strategies=strategies)


# Blocks.


def in_blocks(module: Module, blocks: int) -> Module:
    """`module` with a leading dim of blocks on every value between grouped products."""
    blocked = _Blocked(module).find()
    return Module(tuple(_written(function, blocks, blocked) for function in module.functions), module.mesh)


class _Blocked:
    """The values that can have the dim: made by grouped products, and in the end read by grouped products alone."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.same: dict[Value, list[Value]] = defaultdict(list)
        self.readers: dict[Value, list[Op]] = defaultdict(list)
        self.maker: dict[Value, Op] = {}
        self.ends = set(module.main.results)
        for function in module.functions:
            for op in function.ops:
                for value in op.inputs():
                    self.readers[value].append(op)
                self.maker.update(dict.fromkeys(op.results, op))
                if op.name == "call":
                    callee = module.function(op.callee)
                    self._tie(list(op.inputs()), callee.params)
                    self._tie(op.results, callee.results)

    def _tie(self, outside: Sequence[Value], inside: Sequence[Value]) -> None:
        for one, other in zip(outside, inside, strict=True):
            self.same[one].append(other)
            self.same[other].append(one)

    def find(self) -> set[Value]:
        blocked_values = self._reached()
        waiting = list(blocked_values)
        while waiting:
            value = waiting.pop()
            if value in blocked_values and not self._can(value, blocked_values):
                blocked_values.discard(value)
                waiting += self._neighbors(value)
        return blocked_values

    def _reached(self) -> set[Value]:
        """Values made from grouped products by ops that treat every row alike."""
        blocked_values: set[Value] = set()
        waiting = [result for op in _grouped(self.module) if op.name == GROUPED_MM for result in op.results]
        while waiting:
            value = waiting.pop()
            if value not in blocked_values:
                blocked_values.add(value)
                waiting += self.same[value]
                waiting += [result for op in self.readers[value] if _treats_alike(op) for result in op.results]
        return blocked_values

    def _neighbors(self, value: Value) -> Iterator[Value]:
        yield from self.same[value]
        if value in self.maker:
            yield from self.maker[value].inputs()
            yield from self.maker[value].results
        for op in self.readers[value]:
            yield from op.results

    def _can(self, value: Value, blocked_values: set[Value]) -> bool:
        if value in self.ends or any(other not in blocked_values for other in self.same[value]):
            return False
        maker = self.maker.get(value)
        if maker is not None and maker.name != "call" and maker.name != GROUPED_MM:
            if any(result not in blocked_values for result in maker.results):
                return False
            if not any(operand in blocked_values for operand in maker.inputs()):
                return False
        return all(self._may_read(op, value, blocked_values) for op in self.readers[value])

    def _may_read(self, op: Op, value: Value, blocked_values: set[Value]) -> bool:
        if op.name == "call":
            return True
        if op.name in (GROUPED_MM, GROUPED_OUTER):
            return value in list(op.inputs())[: 1 if op.name == GROUPED_MM else 2]
        return _treats_alike(op) and all(result in blocked_values for result in op.results)


_ALONG = frozenset({"aten.slice.Tensor", "aten.cat", "aten.split_with_sizes", "aten.split.Tensor"})
"""Ops that slice or concatenate along a dim that an attribute names."""


def _treats_alike(op: Op) -> bool:
    """Whether the op does the same to every row, and a further dim before them changes nothing."""
    if op.name in _ALONG:
        return attr_int(op, "dim") % len(op.results[0].type.shape) > 0
    if kind_of(op) is not Kind.LIGHT or attr_ints(op, "dim") or "size" in op.attrs or len(op.results) != 1:
        return False
    rule = rule_of(op)
    (result,) = rule.results
    aligned = ((dims, result[len(result) - len(dims) :]) for dims in rule.operands)
    return not rule.whole and all(a in ((), b) for dims, same in aligned for a, b in zip(dims, same, strict=True))


def _written(function: Function, blocks: int, blocked: set[Value]) -> Function:
    def renewed(value: Value) -> Value:
        return Value(_leading(value.type, blocks), value.name) if value in blocked else value

    new = {value: renewed(value) for value in function.values()}
    writer = _Writer(blocks, blocked, new)
    return replace(
        function,
        params=tuple(new[value] for value in function.params),
        ops=tuple(each for op in function.ops for each in writer.written(op)),
        results=tuple(new[value] for value in function.results),
    )


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes the ops of one function out with the dim of blocks."""

    blocks: int
    blocked: set[Value]
    new: Mapping[Value, Value]

    def written(self, op: Op) -> Iterator[Op]:
        if op.name == GROUPED_MM:
            yield from self._product(op)
        elif op.name == GROUPED_OUTER:
            yield from self._gradient(op)
        else:
            attrs = op.attrs
            if op.name in _ALONG and op.results[0] in self.blocked:
                attrs = {**attrs, "dim": attr_int(op, "dim") % len(op.results[0].type.shape) + 1}
            results = tuple(self.new[value] for value in op.results)
            yield replace(op.with_operands(self.new), results=results, attrs=attrs)

    def _product(self, op: Op) -> Iterator[Op]:
        x, weight, ids = op.inputs()
        (result,) = op.results
        if x not in self.blocked and result not in self.blocked:
            yield op.with_operands(self.new)
            return
        read = self._shared(x)
        yield from read.ops
        product = Value(_leading(result.type, self.blocks), result.name)
        if result in self.blocked:
            product = self.new[result]
        yield replace(op, operands=(read.value, self.new[weight], self.new[ids]), results=(product,))
        if result not in self.blocked:
            yield Op("aten.sum.dim_IntList", (product,), (result,), {"dim": (0,), "keepdim": False}, op.loc)

    def _gradient(self, op: Op) -> Iterator[Op]:
        grad, x, ids = op.inputs()
        if grad not in self.blocked and x not in self.blocked:
            yield op.with_operands(self.new)
            return
        one, other = self._shared(grad), self._shared(x)
        yield from (*one.ops, *other.ops)
        yield replace(op, operands=(one.value, other.value, self.new[ids]))

    def _shared(self, value: Value) -> _Shared:
        """A value with the dim of blocks; where it has none yet, a view with one block that all ranks share."""
        if value in self.blocked:
            return _Shared(self.new[value])
        seen = Value(_leading(value.type, 1), value.name)
        return _Shared(seen, (Op("aten.view", (value,), (seen,), {"size": seen.type.shape}),))


@dataclass(frozen=True, slots=True)
class _Shared:
    value: Value
    ops: tuple[Op, ...] = ()


def _leading(tensor_type: TensorType, size: int) -> TensorType:
    """The type with one more leading dim."""
    splits = tuple(replace(split, dim=split.dim + 1) for split in tensor_type.layout.splits)
    layout: Layout = replace(tensor_type.layout, splits=splits)
    return TensorType(tensor_type.dtype, (size, *tensor_type.shape), layout)
