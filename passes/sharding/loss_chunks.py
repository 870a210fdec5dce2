"""The loss in chunks of tokens: logits and what is made of them, forward and backward, exist for one chunk at a time.

The largest product of a language model's step is its last, and its size does not fall with depth: logits for every
token and every word, their logarithms, and gradients of both. All of it is cut along the tokens into the parts of a
time axis, from the hidden states as far as their gradients: so nothing is computed twice, and gradients of the weight
are sums over chunks.
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
from moaic.passes.sharding.data_parallel import cheapest_in_time
from moaic.passes.sharding.partitioner import Axis, partition
from moaic.passes.transforms.dce import needed_forward
from moaic.passes.transforms.outline import fresh, shape_of, spelled_out


@dataclass(frozen=True, slots=True)
class ChunkLoss:
    name: ClassVar[str] = CHUNKS
    summary: ClassVar[str] = "compute the loss in chunks of tokens"
    parts: int = 2

    def apply(self, module: Module) -> Module:
        return in_chunks(module, self.parts)


def in_chunks(module: Module, count: int) -> Module:
    """`module` with its loss in so many chunks; raises Diagnostic where there are no logits, or none that divide."""
    mesh = module.mesh.with_axis(CHUNKS, count)
    staged = ", and a stage may begin amid the loss" if module.mesh.size("pp") > 1 else ""
    logits = logits_of(module.main)
    if logits is None:
        raise Diagnostic(
            f"loss_chunks={count} is about logits, and the last product of this step is not its largest{staged}"
        )
    found = next(_cuts(module.main, logits, mesh), None)
    if found is None:
        shape = " x ".join(map(str, logits.type.local_shape(module.mesh)))
        raise Diagnostic(
            f"loss_chunks={count} cannot cut this loss into equal chunks: its logits are {shape} at a time{staged}"
        )
    main = _cut(module, found, Axis(CHUNKS, count, is_loop=True))
    return replace(module, functions=(*module.functions[:-1], main), mesh=mesh)


def logits_of(function: Function) -> Value | None:
    """The last product of the forward, if it is the largest."""
    ops = [function.ops[i] for i in sorted(needed_forward(function))]
    products = [op.results[0] for op in ops if kind_of(op) is Kind.HEAVY]
    last = products[-1] if products else None
    return last if all(each.type.elements() <= last.type.elements() for each in products if last) else None


@dataclass(frozen=True, slots=True)
class _Region:
    """Ops that are done by chunks, by position, and the states in which they see values."""

    ops: tuple[int, ...]
    states: Mapping[Value, State]


@dataclass(frozen=True)
class _Sight:
    """A function, and which ops make and read each of its values."""

    function: Function

    @cached_property
    def around(self) -> Mapping[Value, Sequence[int]]:
        """Positions of the op that makes a value and of those that read it."""
        found: dict[Value, list[int]] = defaultdict(list)
        for index, op in enumerate(self.function.ops):
            for value in dict.fromkeys((*op.inputs(), *op.results)):
                found[value].append(index)
        return found

    def between(self, inside: Collection[int]) -> set[int]:
        """Ops on a way from these to these."""
        ops = self.function.ops
        made = {result for i in inside for result in ops[i].results}
        after: set[int] = set()
        for index, op in enumerate(ops):
            if any(value in made for value in op.inputs()):
                after.add(index)
                made.update(op.results)
        return after & backward_slice(self.function, [value for i in inside for value in ops[i].inputs()])

    def constants(self, inside: Collection[int]) -> set[int]:
        """What these ops read that is made of nothing."""
        read = {value for i in inside for value in self.function.ops[i].inputs()}
        made = ((i, op) for i, op in enumerate(self.function.ops) if kind_of(op) is Kind.NULLARY)
        return {i for i, op in made if read & {*op.results}}


def _cuts(main: Function, logits: Value, mesh: Mesh) -> Iterator[_Region]:
    """Every way to cut logits along their tokens, the one with the longest runs of neighbours first."""
    sight, kind, count = _Sight(main), logits.type, mesh.size(CHUNKS)
    for dim, size in enumerate(kind.shape[:-1]):
        for stride in (size // parts for parts in range(count, size + 1, count) if size % parts == 0):
            found = _region(sight, logits, Sharded(dim, stride), mesh)
            if found is not None:
                yield found


def _region(sight: _Sight, logits: Value, state: State, mesh: Mesh) -> _Region | None:
    """All ops around values as large as logits that are cut as they are; None where one of these ops cannot be."""
    if not fits(logits.type, CHUNKS, state, mesh):
        return None
    states: dict[Value, State] = {logits: state}
    waiting, inside = [logits], set[int]()
    while waiting:
        value = waiting.pop()
        for index in sight.around[value]:
            if index in inside:
                continue
            inside.add(index)
            op = sight.function.ops[index]
            strategy = _following(op, value, states[value], mesh)
            if strategy is None:
                return None
            for each, wanted in _cut_values(op, strategy):
                if each not in states and each.type.elements() >= logits.type.elements():
                    waiting.append(each)
                if states.setdefault(each, wanted) != wanted:
                    return None
    inside |= sight.between(inside)
    if any(sight.function.ops[i].name == "call" for i in inside):
        return None
    return _Region(tuple(sorted(inside | sight.constants(inside))), states)


def _following(op: Op, value: Value, state: State, mesh: Mesh) -> Strategy | None:
    """How the op is done where this value is cut so."""
    rule = rule_of(op)
    pairs = zip((*op.inputs(), *op.results), (*rule.operands, *rule.results), strict=True)
    dims = next(dims for each, dims in pairs if each is value)
    strategy = rule.following(dims, state, mesh.size(CHUNKS))
    if strategy is None or not all(fits(each.type, CHUNKS, at, mesh) for each, at in _cut_values(op, strategy)):
        return None
    return strategy


def _cut_values(op: Op, strategy: Strategy) -> Iterator[tuple[Value, State]]:
    states = (*strategy.operands, *strategy.results)
    return (
        (value, at) for value, at in zip((*op.inputs(), *op.results), states, strict=True) if isinstance(at, Sharded)
    )


def _cut(module: Module, region: _Region, axis: Axis) -> Function:
    """The main function with the region done by chunks."""
    main = module.main
    whole = _outlined(main, region.ops)
    states = [region.states.get(value, REPLICATED) for value in whole.inputs()]
    function = fresh(Function("loss", tuple(whole.inputs()), tuple(main.ops[i] for i in region.ops), whole.results))
    made = partition(Module((function,), module.mesh), axis, states, lambda role, value, state: state, cheapest_in_time)
    spelled, results = spelled_out(whole, made.module.main)
    new = dict(zip(whole.results, results, strict=True))
    inside = {*region.ops}
    start, gap = region.ops[-1], len(spelled) + 1
    ops = {i * gap: op.with_operands(new) for i, op in enumerate(main.ops) if i not in inside or _is_constant(op)}
    ops |= {start * gap + at: op for at, op in enumerate(spelled, 1)}
    ordered = sort_ops(ops)
    assert ordered is not None, "ops on a way from the loss to the loss are in it"
    return replace(main, ops=ordered, results=tuple(new.get(value, value) for value in main.results))


def _is_constant(op: Op) -> bool:
    return kind_of(op) is Kind.NULLARY


def _outlined(main: Function, region: Sequence[int]) -> Op:
    """The region as one op: what it reads and what of it is read elsewhere."""
    inside = {*region}
    outside = {value for i, op in enumerate(main.ops) if i not in inside for value in op.inputs()} | {*main.results}
    shape = shape_of(main, region)
    made = [result for i in region if not _is_constant(main.ops[i]) for result in main.ops[i].results]
    return Op("call", shape.inputs, tuple(result for result in made if result in outside), {"callee": "loss"})
