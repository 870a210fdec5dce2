"""Model of the compiler's fusion: which ops share a kernel, which values are written to memory, which are views.

An approximation of Inductor for the estimates of time and memory. A heavy op is a kernel of its own, together with the
accumulation that a matmul fuses; connected light ops with no heavy op in between are one kernel; views cost nothing and
count as their operand; constants are computed by each kernel that reads them. A value is written to memory if another
kernel reads it or if it is a result.
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
    """Ops of one kernel, with the values that it reads from memory and writes to it. Views count as their owner."""

    ops: tuple[Op, ...]
    reads: Mapping[Value, int]
    """Bytes read of each value."""
    writes: tuple[Value, ...]

    @property
    def heavy(self) -> Op | None:
        return self.ops[0] if kind_of(self.ops[0]) is Kind.HEAVY else None

    @property
    def nbytes(self) -> int:
        """Bytes that the kernel reads and writes."""
        return sum(self.reads.values()) + sum(map(nbytes, {*self.writes, *self.sums}))

    @property
    def workspace(self) -> int:
        """Bytes that the kernel needs while it runs, beside what it reads and writes."""
        declared = None if self.heavy is None else declaration_of(self.heavy).workspace
        return 0 if declared is None or self.heavy is None else declared(self.heavy)

    @property
    def sums(self) -> tuple[Value, ...]:
        """Sums that the kernel updates in place."""
        return tuple(op.results[0] for op in self.ops if op.name == ADD_TO)


@dataclass(frozen=True)
class Fused:
    """A function of local types as kernels in the order in which they run."""

    function: Function
    owners: Mapping[Value, Value]
    """By value, the value that owns its memory: itself unless it is a view."""
    kernels: tuple[FusedKernel, ...]

    @cached_property
    def transient(self) -> int:
        """Peak bytes of the function without its parameters, results included."""
        last = _last_reads(self)
        live = peak = 0
        dying: dict[int, list[Value]] = defaultdict(list)
        for value, index in last.items():
            dying[index].append(value)
        for index, kernel in enumerate(self.kernels):
            live += sum(map(nbytes, kernel.writes))
            peak = max(peak, live + kernel.workspace)
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


def op_by_op(function: Function) -> Fused:
    """The kernels of a function of local types that is interpreted: one for each op, whose results are all written."""
    owners = _owners(function)
    kernels = [
        FusedKernel((op,), {owners[value]: nbytes(owners[value]) for value in op.inputs()}, own)
        for op in function.ops
        if (own := tuple(result for result in op.results if owners[result] is result))
    ]
    return Fused(function, owners, tuple(kernels))


def _owners(function: Function) -> dict[Value, Value]:
    owners = {param: param for param in function.params}
    taken = taken_over(function)
    for op in function.ops:
        for result in op.results:
            owners[result] = owners[next(op.inputs())] if kind_of(op) is Kind.VIEW else taken.get(result, result)
    return owners


def _groups(function: Function, owners: Mapping[Value, Value]) -> dict[int, list[Op]]:
    """Ops of each kernel, by the index of its first op. Views and constants belong to none.

    Two light ops share a kernel if one reads the other and both have the same depth in heavy ops. Such a group has no
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
    """The number of heavy ops before each op; a light op takes the largest that its readers allow."""
    depths: dict[Op, int] = {}
    known: dict[Value, int] = {}
    for op in function.ops:
        depths[op] = max((known.get(value, 0) for value in op.inputs()), default=0)
        known.update(dict.fromkeys(op.results, depths[op] + (kind_of(op) is Kind.HEAVY)))
    latest: dict[Value, int] = {}
    for op in reversed(function.ops):
        if kind_of(op) is not Kind.HEAVY:
            depths[op] = min((latest[result] for result in op.results if result in latest), default=depths[op])
        for value in op.inputs():
            latest[value] = min(depths[op], latest.get(value, depths[op]))
    return depths


def _added_by_matmuls(function: Function) -> dict[Op, int]:
    """Accumulations that are fused into the matmul that makes the part, and the position of that matmul."""
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
    own = {result for op in ops for result in op.results}
    reads: dict[Value, int] = defaultdict(int)
    for value, size in _read_sizes(ops):
        owner = owners[value]
        if owner not in own and owner not in constants:
            reads[owner] = min(nbytes(owner), reads[owner] + size)
    writes = tuple(
        result for op in ops for result in op.results if result in escaping or readers.get(result, set()) - {group}
    )
    return FusedKernel(tuple(ops), dict(reads), writes)


def _read_sizes(ops: Iterable[Op]) -> Iterable[tuple[Value, int]]:
    """Every value that the ops read, and the bytes that they read of it."""
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
    """By value that dies inside, the last kernel that reads it."""
    last: dict[Value, int] = {}
    for index, kernel in enumerate(fused.kernels):
        last.update(dict.fromkeys(kernel.writes, index))
        last.update((value, index) for value in kernel.reads if value in last)
    for value in fused.results:
        last.pop(value, None)
    return last
