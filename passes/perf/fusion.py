"""What a compiler will make of a function: which ops share a kernel, which values reach memory, which are only views.

An approximation of Inductor that cost and memory share: a heavy op is a kernel of its own, with the addition to a sum
that a matmul does as well; light ops that feed each other with no heavy op in between are one kernel; views cost
nothing and stand for what they look at; what attributes alone make is built where it is read. A value reaches memory if
another kernel reads it or if it is a result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from moaic.ir.accumulation import taken_over
from moaic.ir.graph import Function, Op, Value
from moaic.ir.op_names import ADD_TO
from moaic.ir.ops import Kind, declaration_of, kind_of
from moaic.ir.topological_sort import topological_sort
from moaic.ir.types import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Ops that run as one: `reads` come from memory, `writes` go there. Both name the values that own the memory."""

    ops: tuple[Op, ...]
    reads: Mapping[Value, int]
    """Bytes read of each value."""
    writes: tuple[Value, ...]

    @property
    def heavy(self) -> Op | None:
        return self.ops[0] if kind_of(self.ops[0]) is Kind.HEAVY else None

    @property
    def nbytes(self) -> int:
        """Bytes that pass between the kernel and memory."""
        return sum(self.reads.values()) + sum(map(nbytes, {*self.writes, *self.sums}))

    @property
    def sums(self) -> tuple[Value, ...]:
        """What is written where a sum lay."""
        return tuple(op.results[0] for op in self.ops if op.name == ADD_TO)


@dataclass(frozen=True)
class Fused:
    """A function of local types as kernels in the order in which they run."""

    function: Function
    owners: Mapping[Value, Value]
    """For every value the one whose memory it is: itself unless it is a view."""
    kernels: tuple[FusedKernel, ...]

    @cached_property
    def transient(self) -> int:
        """Most bytes that the function holds at once beside its parameters, its results among them."""
        last = _last_reads(self)
        live = peak = 0
        dying: dict[int, list[Value]] = defaultdict(list)
        for value, index in last.items():
            dying[index].append(value)
        for index, kernel in enumerate(self.kernels):
            live += sum(map(nbytes, kernel.writes))
            peak = max(peak, live)
            live -= sum(map(nbytes, dying[index]))
        return max(peak, sum(nbytes(value) for value in set(self.results) - set(self.function.params)))

    @property
    def results(self) -> tuple[Value, ...]:
        """The owner of each result: a parameter, or a value made inside."""
        return tuple(self.owners[value] for value in self.function.results)


def nbytes(value: Value) -> int:
    """Bytes of a value of local type."""
    count = DTYPE_BYTES[value.type.dtype]
    for size in value.type.shape:
        count *= size
    return count


def fuse(function: Function) -> Fused:
    """The kernels of a function whose types are local (what `localize` returns)."""
    owners = _owners(function)
    groups = _groups(function, owners)
    readers: dict[Value, set[int]] = defaultdict(set)
    for group, ops in groups.items():
        for op in ops:
            for value in op.inputs():
                readers[owners[value]].add(group)
    escaping = {owners[value] for value in function.results}
    constants = {r for op in function.ops if kind_of(op) is Kind.NULLARY for r in op.results}
    kernels = {group: _kernel(ops, group, owners, readers, escaping, constants) for group, ops in groups.items()}
    return Fused(function, owners, _in_order(kernels))


def _owners(function: Function) -> dict[Value, Value]:
    owners = {param: param for param in function.params}
    taken = taken_over(function)
    for op in function.ops:
        for result in op.results:
            owners[result] = owners[next(op.inputs())] if kind_of(op) is Kind.VIEW else taken.get(result, result)
    return owners


def _groups(function: Function, owners: Mapping[Value, Value]) -> dict[int, list[Op]]:
    """Ops of each kernel, by the index of its first op. Views and constants belong to none.

    Two light ops share a kernel if one reads the other and both are done after as many heavy ops. Such a group has no
    path that leaves it and comes back: the path would pass a heavy op, and its depth would differ.
    """
    depth = _depths(function)
    inside = _added_by_matmuls(function)
    parent: dict[int, int] = {}
    light: dict[Value, int] = {}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index, op in enumerate(function.ops):
        kind = kind_of(op)
        if kind in (Kind.VIEW, Kind.NULLARY):
            continue
        parent[index] = inside.get(op, index)
        if kind is Kind.HEAVY or op in inside:
            continue
        light.update(dict.fromkeys(op.results, index))
        for value in map(owners.__getitem__, op.inputs()):
            if value in light and depth[function.ops[light[value]]] == depth[op]:
                first, second = sorted((root(light[value]), root(index)))
                parent[second] = first
    groups: dict[int, list[Op]] = defaultdict(list)
    for index in parent:
        groups[root(index)].append(function.ops[index])
    return groups


def _depths(function: Function) -> dict[Op, int]:
    """After how many heavy ops each op is done: as late as those that read it allow, but for heavy ones."""
    above: dict[Op, int] = {}
    known: dict[Value, int] = {}
    for op in function.ops:
        above[op] = max((known.get(value, 0) for value in op.inputs()), default=0)
        known.update(dict.fromkeys(op.results, above[op] + (kind_of(op) is Kind.HEAVY)))
    latest: dict[Value, int] = {}
    for op in reversed(function.ops):
        if kind_of(op) is not Kind.HEAVY:
            above[op] = min((latest[result] for result in op.results if result in latest), default=above[op])
        for value in op.inputs():
            latest[value] = min(above[op], latest.get(value, above[op]))
    return above


def _added_by_matmuls(function: Function) -> dict[Op, int]:
    """Additions to sums that the matmul which makes the part does as well, and the position of that matmul."""
    adds = [op for op in function.ops if op.name == ADD_TO]
    if not adds:
        return {}
    reads = function.reads()
    products = {op.results[0]: index for index, op in enumerate(function.ops) if op.name == "aten.mm"}
    return {
        op: products[part]
        for op in adds
        if isinstance(part := op.operands[1], Value)
        and part in products
        and reads[part] == 1
        and part.type == op.results[0].type
    }


def _kernel(
    ops: Sequence[Op],
    group: int,
    owners: Mapping[Value, Value],
    readers: Mapping[Value, set[int]],
    escaping: set[Value],
    constants: set[Value],
) -> FusedKernel:
    made = {result for op in ops for result in op.results}
    reads: dict[Value, int] = defaultdict(int)
    for value, size in _looked_at(ops):
        owner = owners[value]
        if owner not in made and owner not in constants:
            reads[owner] = min(nbytes(owner), reads[owner] + size)
    writes = tuple(
        result for op in ops for result in op.results if result in escaping or readers.get(result, set()) - {group}
    )
    return FusedKernel(tuple(ops), dict(reads), writes)


def _looked_at(ops: Iterable[Op]) -> Iterable[tuple[Value, int]]:
    """Every value that the ops read, once, and how many bytes of it."""
    sizes: dict[Value, int] = {}
    for op in ops:
        for position, value in enumerate(op.inputs()):
            partly = position == 0 and declaration_of(op).looks_up
            size = min(nbytes(value), nbytes(op.results[0])) if partly else nbytes(value)
            sizes[value] = max(size, sizes.get(value, 0))
    return sizes.items()


def _in_order(kernels: Mapping[int, FusedKernel]) -> tuple[FusedKernel, ...]:
    """Kernels after those they read from, otherwise by their first op."""
    made_by = {value: group for group, kernel in kernels.items() for value in kernel.writes}
    waiting = {group: {made_by[v] for v in kernel.reads if v in made_by} for group, kernel in kernels.items()}
    ordered = topological_sort(waiting)
    assert ordered is not None, "fused groups wait for each other"
    return tuple(kernels[group] for group in ordered)


def _last_reads(fused: Fused) -> dict[Value, int]:
    """For every value that dies inside, the kernel after which nobody needs it."""
    last: dict[Value, int] = {}
    for index, kernel in enumerate(fused.kernels):
        last.update(dict.fromkeys(kernel.writes, index))
        last.update((value, index) for value in kernel.reads if value in last)
    for value in fused.results:
        last.pop(value, None)
    return last
