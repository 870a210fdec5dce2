"""The loss in chunks of tokens: logits and what is made of them, forward and backward, exist for one chunk at a time.

The largest product of a language model's step is its last: logits for every token and every word, their logarithms,
and the gradients of both. All of it is sharded along the tokens over a loop axis, from the hidden states to their
gradients: nothing is computed twice, and the gradient of the weight is a sum over chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from moaic.ir.backward_slice import backward_slice
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import REPLICATED, Mesh, Sharded, State
from moaic.ir.ops import Kind, kind_of, rule_of
from moaic.ir.rules import Strategy, fits
from moaic.ir.topological_sort import sort_ops
from moaic.passes.loop_axes import CHUNKS
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.data_parallel import cheapest_in_time
from moaic.passes.sharding.partitioner import partition
from moaic.passes.transforms.dce import needed_forward
from moaic.passes.transforms.outline import fresh, inlined_call, shape_of


@dataclass(frozen=True, slots=True)
class LossChunks:
    name: ClassVar[str] = CHUNKS
    summary: ClassVar[str] = "compute the loss in chunks of tokens"
    parts: int = 2

    def apply(self, module: Module) -> Module:
        return in_chunks(module, self.parts)


def in_chunks(module: Module, count: int) -> Module:
    """`module` with its loss in `count` chunks; raises Diagnostic where there are no logits, or none that divide."""
    mesh = module.mesh.with_axis(CHUNKS, count)
    staged = ", and a stage may begin amid the loss" if module.mesh.size("pp") > 1 else ""
    logits = logits_of(module.main)
    if logits is None:
        raise Diagnostic(
            f"loss_chunks={count} is about logits, and the last product of this step is not its largest{staged}"
        )
    region = next(_regions(module.main, logits, mesh), None)
    if region is None:
        shape = " x ".join(map(str, logits.type.local_shape(module.mesh)))
        raise Diagnostic(
            f"loss_chunks={count} cannot cut this loss into equal chunks: its logits are {shape} at a time{staged}"
        )
    main = _chunked(module, region, Axis(CHUNKS, count, is_loop=True))
    return replace(module, functions=(*module.functions[:-1], main), mesh=mesh)


def logits_of(function: Function) -> Value | None:
    """The result of the last matrix product of the forward, if it is the largest; else None."""
    ops = [function.ops[i] for i in sorted(needed_forward(function))]
    products = [op.results[0] for op in ops if kind_of(op) is Kind.HEAVY]
    last = products[-1] if products else None
    return last if all(each.type.elements() <= last.type.elements() for each in products if last) else None


@dataclass(frozen=True, slots=True)
class _Region:
    """Ops that run once per chunk, by position, and the states in which they read and make values."""

    ops: tuple[int, ...]
    states: Mapping[Value, State]


@dataclass(frozen=True)
class _DefUse:
    """A function with the ops that make and read each of its values."""

    function: Function

    @cached_property
    def neighbors(self) -> Mapping[Value, Sequence[int]]:
        """Positions of the op that makes a value and of those that read it."""
        neighbors: dict[Value, list[int]] = defaultdict(list)
        for index, op in enumerate(self.function.ops):
            for value in dict.fromkeys((*op.inputs(), *op.results)):
                neighbors[value].append(index)
        return neighbors

    def between(self, inside: Collection[int]) -> set[int]:
        """Positions of the ops on a path from one of these ops to another."""
        ops = self.function.ops
        made = {result for i in inside for result in ops[i].results}
        after: set[int] = set()
        for index, op in enumerate(ops):
            if any(value in made for value in op.inputs()):
                after.add(index)
                made.update(op.results)
        return after & backward_slice(self.function, [value for i in inside for value in ops[i].inputs()])

    def constants(self, inside: Collection[int]) -> set[int]:
        """Positions of the ops without operands whose results these ops read."""
        read = {value for i in inside for value in self.function.ops[i].inputs()}
        made = ((i, op) for i, op in enumerate(self.function.ops) if kind_of(op) is Kind.NULLARY)
        return {i for i, op in made if read & {*op.results}}


def _regions(main: Function, logits: Value, mesh: Mesh) -> Iterator[_Region]:
    """The region for every way to shard logits along their tokens, the longest contiguous runs first."""
    def_use, tensor_type, count = _DefUse(main), logits.type, mesh.size(CHUNKS)
    for dim, size in enumerate(tensor_type.shape[:-1]):
        for stride in (size // parts for parts in range(count, size + 1, count) if size % parts == 0):
            region = _region(def_use, logits, Sharded(dim, stride), mesh)
            if region is not None:
                yield region


def _region(def_use: _DefUse, logits: Value, state: State, mesh: Mesh) -> _Region | None:
    """All ops that make or read a value as large as the logits, sharded alike; None where one of them cannot be."""
    if not fits(logits.type, CHUNKS, state, mesh):
        return None
    states: dict[Value, State] = {logits: state}
    waiting, inside = [logits], set[int]()
    while waiting:
        value = waiting.pop()
        for index in def_use.neighbors[value]:
            if index in inside:
                continue
            inside.add(index)
            op = def_use.function.ops[index]
            strategy = _following(op, value, states[value], mesh)
            if strategy is None:
                return None
            for other, wanted in _sharded_values(op, strategy):
                if other not in states and other.type.elements() >= logits.type.elements():
                    waiting.append(other)
                if states.setdefault(other, wanted) != wanted:
                    return None
    inside |= def_use.between(inside)
    if any(def_use.function.ops[i].name == "call" for i in inside):
        return None
    return _Region(tuple(sorted(inside | def_use.constants(inside))), states)


def _following(op: Op, value: Value, state: State, mesh: Mesh) -> Strategy | None:
    """The strategy of the op that has this value in this state."""
    rule = rule_of(op)
    pairs = zip((*op.inputs(), *op.results), (*rule.operands, *rule.results), strict=True)
    dims = next(dims for other, dims in pairs if other is value)
    strategy = rule.following(dims, state, mesh.size(CHUNKS))
    if strategy is None or not all(
        fits(other.type, CHUNKS, wanted, mesh) for other, wanted in _sharded_values(op, strategy)
    ):
        return None
    return strategy


def _sharded_values(op: Op, strategy: Strategy) -> Iterator[tuple[Value, State]]:
    states = (*strategy.operands, *strategy.results)
    return (
        (value, state)
        for value, state in zip((*op.inputs(), *op.results), states, strict=True)
        if isinstance(state, Sharded)
    )


def _chunked(module: Module, region: _Region, axis: Axis) -> Function:
    """The main function with the region over the loop axis."""
    main = module.main
    whole = _outlined(main, region.ops)
    function = fresh(Function("loss", tuple(whole.inputs()), tuple(main.ops[i] for i in region.ops), whole.results))
    pairs = zip(function.params, whole.inputs(), strict=True)
    states = {param: region.states.get(value, REPLICATED) for param, value in pairs}
    chunked = partition(
        Module((function,), module.mesh), axis, states, lambda role, value, state: state, cheapest_in_time
    )
    spelled, results = inlined_call(whole, chunked.module.main)
    new = dict(zip(whole.results, results, strict=True))
    inside = {*region.ops}
    start, gap = region.ops[-1], len(spelled) + 1
    ops = {i * gap: op.with_operands(new) for i, op in enumerate(main.ops) if i not in inside or _is_constant(op)}
    ops |= {start * gap + offset: op for offset, op in enumerate(spelled, 1)}
    ordered = sort_ops(ops)
    assert ordered is not None, "ops on a way from the loss to the loss are in it"
    return replace(main, ops=ordered, results=tuple(new.get(value, value) for value in main.results))


def _is_constant(op: Op) -> bool:
    return kind_of(op) is Kind.NULLARY


def _outlined(main: Function, region: Sequence[int]) -> Op:
    """The region as one call: its operands, and those of its results that are read elsewhere."""
    inside = {*region}
    outside = {value for i, op in enumerate(main.ops) if i not in inside for value in op.inputs()} | {*main.results}
    shape = shape_of(main, region)
    made = [result for i in region if not _is_constant(main.ops[i]) for result in main.ops[i].results]
    return Op("call", shape.inputs, tuple(result for result in made if result in outside), {"callee": "loss"})
