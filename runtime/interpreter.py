"""The reference interpreter: what a module means, run op by op through torch on the CPU.

`run_function` gives the meaning of a function on whole tensors, whatever its layouts. `run_ranks` runs an annotated
module or a program on virtual ranks in one process, all ranks op by op in step, collectives as plain array moves. It
is the oracle of everything that splits, moves or reorders: both must agree for every plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.layout import Mesh, Split
from moaic.ir.localize import localize
from moaic.ir.op_names import (
    ACCUMULATE,
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    FIRST,
    JOIN,
    PART,
    REDUCE_SCATTER,
    SEND,
    SHARD,
)
from moaic.ir.ops import Kind, kind_of
from moaic.ir.ring_attention import attention_of, is_ring
from moaic.ir.types import TensorType
from moaic.runtime.codegen.lower_to_fx import last_uses, operand_of, run_op, run_ops
from moaic.runtime.dtypes import DTYPES

PerRank = list[Tensor]
"""One rank's part of a value after the other."""

ABSENT: Final = torch.empty(0)
"""What a rank has of a value that it does not hold."""

TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""How far ranks that should hold one value may differ, relative to its largest element."""


def run_function(module: Module, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a function on whole tensors; layouts and collectives say nothing about what a value is."""
    with torch.no_grad():
        return _run_whole(module, module.function(name), inputs)


def run_ranks(module: Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of the main function from whole tensors, scattered and gathered as the layouts say."""
    main = module.main
    parts = [scatter(tensor, param.type, module.mesh) for tensor, param in zip(inputs, main.params, strict=True)]
    results = run_parts(module, parts)
    pairs = zip(results, main.results, strict=True)
    return [gather(result, value.type, module.mesh) for result, value in pairs]


def run_parts(module: Module, inputs: Sequence[PerRank], name: str = "") -> list[PerRank]:
    """The results of a function (the main one unless named), both parameters and results as every rank's parts."""
    with torch.no_grad():
        function = module.function(name) if name else module.main
        work = _Ranks(module)
        return work.run(function, inputs, work.everyone)


# Whole tensors.


def _run_whole(module: Module, function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    values: dict[Value, Tensor] = {}
    _bind(values, function.params, inputs, function.name)
    for op, dead in zip(function.ops, last_uses(function), strict=True):
        operands = [operand_of(operand, values) for operand in op.operands]
        _bind(values, op.results, _whole_op(module, op, operands), op.name)
        for value in dead:
            del values[value]
    return [values[value] for value in function.results]


def _whole_op(module: Module, op: Op, operands: list[Any]) -> Sequence[Tensor]:
    if op.name == "call":
        return _run_whole(module, module.function(op.callee), operands)
    if op.name in _CARRIED_OUT or op.name == SEND:
        return operands
    if is_ring(op):
        return run_op(attention_of(op), operands)
    if op.name not in MOVES_IN_TIME:
        return run_op(op, operands)
    if module.mesh.ranks > 1:
        raise Diagnostic(f"`{op.name}` cuts what one rank holds: a program with it runs on ranks, not on whole tensors")
    return [MOVES_IN_TIME[op.name](op, operands, module.mesh)]


def _bind(values: dict[Value, Tensor], names: Sequence[Value], tensors: Sequence[Tensor], what: str) -> None:
    assert len(names) == len(tensors), f"{what}: {len(tensors)} values for {len(names)} names"
    for value, tensor in zip(names, tensors, strict=True):
        _check(tensor, value.type.dtype, value.type.shape, what)
        values[value] = tensor


def _check(tensor: Tensor, dtype: str, shape: tuple[int, ...], what: str) -> None:
    found = (tensor.dtype, tuple(tensor.shape))
    assert found == (DTYPES[dtype], shape), f"{what}: made {found}, its type says {dtype}{list(shape)}"


# Many ranks.


class _Ranks:
    """A module on the ranks of its mesh. Functions and ops are made local once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.mesh = module.mesh
        self.places = [self.mesh.coordinates(rank) for rank in range(self.mesh.ranks)]
        self.everyone = list(range(self.mesh.ranks))
        self.local: dict[Function | Op, Function] = {}

    def run(self, function: Function, inputs: Sequence[PerRank], ranks: Sequence[int]) -> list[PerRank]:
        """The function on these ranks; the others have nothing of its values."""
        if all(kind_of(op) is not Kind.INSTRUCTION for op in function.ops):
            return self._compute(function, function, inputs, ranks)
        values: dict[Value, PerRank] = {}
        self._bind(values, function.params, inputs, function.name, ranks)
        for op, dead in zip(function.ops, last_uses(function), strict=True):
            self._bind(values, op.results, self._op(op, values, ranks), op.name, ranks)
            for value in dead:
                del values[value]
        return [values[value] for value in function.results]

    def _op(self, op: Op, values: Mapping[Value, PerRank], ranks: Sequence[int]) -> list[PerRank]:
        operands = [values[value] for value in op.inputs()]
        if op.name == SEND:
            return [self._send(op, operands[0])]
        there = [rank for rank in ranks if all(self._holds(value, rank) for value in op.results)]
        if op.name == "call":
            return self.run(self.module.function(op.callee), operands, there)
        if op.name in _CARRIED_OUT:
            return [self._collective(op, operands[0], there)]
        if is_ring(op):
            return self._ring(op, values, there)
        if op.name in MOVES_IN_TIME:
            moved = self._absent()
            for rank in there:
                moved[rank] = MOVES_IN_TIME[op.name](op, [parts[rank] for parts in operands], self.module.mesh)
            return [moved]
        inputs = list(dict.fromkeys(op.inputs()))
        alone = Function(op.name, tuple(inputs), (op,), op.results)
        return self._compute(op, alone, [values[value] for value in inputs], there)

    def _compute(
        self, key: Function | Op, function: Function, inputs: Sequence[PerRank], ranks: Sequence[int]
    ) -> list[PerRank]:
        if key not in self.local:
            self.local[key] = localize(function, self.mesh)
        local = self.local[key]
        axes = [local.param_role(index).label for index in range(len(function.params), len(local.params))]
        results = [self._absent() for _ in function.results]
        for rank in ranks:
            coordinates = [torch.tensor(self.places[rank][axis]) for axis in axes]
            made = run_ops(local, [*(parts[rank] for parts in inputs), *coordinates])
            for parts, tensor in zip(results, made, strict=True):
                parts[rank] = tensor
        self._bind({}, function.results, results, function.name, ranks)
        return results

    def _collective(self, op: Op, parts: PerRank, ranks: Sequence[int]) -> PerRank:
        axis = op.attrs["axis"]
        assert isinstance(axis, str)
        source, target = next(op.inputs()).type, op.results[0].type
        made = self._absent()
        for rank in ranks:
            group = self.mesh.group(rank, axis)
            if rank == group[0]:
                given = [parts[member] for member in group]
                results = _CARRIED_OUT[op.name](given, source, target, axis, self.mesh)
                for member, result in zip(group, results, strict=True):
                    made[member] = result
        return made

    def _ring(self, op: Op, values: Mapping[Value, PerRank], ranks: Sequence[int]) -> list[PerRank]:
        """Attention of all blocks at once, cut into blocks again."""
        axis = str(op.attrs["axis"])
        made = [self._absent() for _ in op.results]
        for rank in ranks:
            group = self.mesh.group(rank, axis)
            if rank != group[0]:
                continue
            joined = {value: self._joined(values[value], group, value.type, axis) for value in op.inputs()}
            results = run_op(attention_of(op), [operand_of(operand, joined) for operand in op.operands])
            for parts, value, whole in zip(made, op.results, results, strict=True):
                for member, part in zip(group, _split_over(whole, value.type, axis, self.mesh), strict=True):
                    parts[member] = part
        return made

    def _joined(self, parts: PerRank, group: Sequence[int], kind: TensorType, axis: str) -> Tensor:
        """What a group along the axis has of a value, together."""
        if kind.layout.split_of(axis) is None:
            return parts[group[0]]
        return _joined_over([parts[member] for member in group], kind, axis, self.mesh)

    def _send(self, op: Op, parts: PerRank) -> PerRank:
        """Between ranks that differ along the axis alone."""
        axis = op.attrs["axis"]
        assert isinstance(axis, str)
        source, made = next(op.inputs()).type.layout.owner_on(axis), self._absent()
        for rank in self.everyone:
            if self._holds(op.results[0], rank):
                made[rank] = parts[self.mesh.group(rank, axis)[source or 0]]
        return made

    def _holds(self, value: Value, rank: int) -> bool:
        return value.type.layout.holds(self.places[rank])

    def _absent(self) -> PerRank:
        return [ABSENT] * self.mesh.ranks

    def _bind(
        self,
        values: dict[Value, PerRank],
        names: Sequence[Value],
        parts: Sequence[PerRank],
        what: str,
        ranks: Sequence[int],
    ) -> None:
        assert len(names) == len(parts), f"{what}: {len(parts)} values for {len(names)} names"
        for value, tensors in zip(names, parts, strict=True):
            shape = value.type.local_shape(self.mesh)
            for rank in ranks:
                if self._holds(value, rank):
                    _check(tensors[rank], value.type.dtype, shape, what)
            values[value] = tensors


# Moves. A digit of a dim is `size` ranks at `stride`: index i of the dim lies at (i // stride) % size.


def take_digit(tensor: Tensor, dim: int, stride: int, size: int, at: int) -> Tensor:
    """The elements whose digit is `at`: the dim seen as (outer, size, stride), the middle picked."""
    before, count, after = tensor.shape[:dim], tensor.shape[dim], tensor.shape[dim + 1 :]
    seen = tensor.reshape(*before, count // (size * stride), size, stride, *after)
    return seen.select(dim + 1, at).reshape(*before, count // size, *after)


def put_digits(parts: Sequence[Tensor], dim: int, stride: int) -> Tensor:
    """The inverse of `take_digit` for every digit in order."""
    before, count, after = parts[0].shape[:dim], parts[0].shape[dim], parts[0].shape[dim + 1 :]
    seen = [part.reshape(*before, count // stride, stride, *after) for part in parts]
    return torch.stack(seen, dim + 1).reshape(*before, count * len(parts), *after)


def scatter(tensor: Tensor, kind: TensorType, mesh: Mesh) -> PerRank:
    """Every rank's part of a whole tensor. Of a pending sum the first rank holds the value, the others zeros."""
    parts: PerRank = []
    for rank in range(mesh.ranks):
        at = mesh.coordinates(rank)
        if not kind.layout.holds(at):
            parts.append(ABSENT)
            continue
        part = tensor
        for split in sorted(kind.layout.splits, key=lambda split: -split.stride):
            part = take_digit(part, split.dim, split.stride, mesh.size(split.axis), at[split.axis])
        keeps = all(at[axis] == 0 for axis in kind.layout.partial)
        parts.append(part.contiguous() if keeps else torch.zeros_like(part))
    return parts


def gather(parts: PerRank, kind: TensorType, mesh: Mesh) -> Tensor:
    """The whole tensor of which ranks hold `parts`, pending sums summed; ranks that should agree must."""
    homeless = {axis: 0 for axis, _ in kind.layout.owner}
    places = {rank: mesh.coordinates(rank) for rank in range(mesh.ranks)}
    held = {mesh.rank({**at, **homeless}): parts[rank] for rank, at in places.items() if kind.layout.holds(at)}
    for axis in kind.layout.partial:
        held = _folded(held, mesh, axis, lambda members: torch.stack(members).sum(0).to(members[0].dtype))
    for split in sorted(kind.layout.splits, key=lambda split: split.stride):
        held = _folded(held, mesh, split.axis, _putter(split))
    for axis, _ in mesh.axes:
        held = _folded(held, mesh, axis, _agreed)
    return held[0]


def _folded(
    held: Mapping[int, Tensor], mesh: Mesh, axis: str, fold: Callable[[list[Tensor]], Tensor]
) -> dict[int, Tensor]:
    """One value per group along `axis`, kept by the group's first rank."""
    firsts = [rank for rank in held if mesh.coordinates(rank)[axis] == 0]
    return {rank: fold([held[member] for member in mesh.group(rank, axis) if member in held]) for rank in firsts}


def _putter(split: Split) -> Callable[[list[Tensor]], Tensor]:
    # Digits below are in place already and those above are not there yet, so the stride is that of the whole tensor.
    return lambda members: put_digits(members, split.dim, split.stride)


def _agreed(members: list[Tensor]) -> Tensor:
    first = members[0]
    for index, other in enumerate(members[1:], 1):
        if not _same(first, other):
            raise AssertionError(f"ranks 0 and {index} of an axis hold different values of what should be whole")
    return first


def _same(one: Tensor, other: Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = one.abs().max().item() if one.numel() and bool(one.isfinite().all()) else 1.0
    return torch.allclose(one, other, rtol=0, atol=TOLERANCES[one.dtype] * max(largest, 1e-30), equal_nan=True)


Collective = Callable[[list[Tensor], TensorType, TensorType, str, Mesh], list[Tensor]]


def _summed(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _split_over(tensor: Tensor, kind: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    split = kind.layout.split_of(axis)
    assert split is not None
    stride, size = kind.layout.local_stride(split, mesh), mesh.size(axis)
    return [take_digit(tensor, split.dim, stride, size, at) for at in range(size)]


def _joined_over(parts: list[Tensor], kind: TensorType, axis: str, mesh: Mesh) -> Tensor:
    split = kind.layout.split_of(axis)
    assert split is not None
    return put_digits(parts, split.dim, kind.layout.local_stride(split, mesh))


def _all_reduce(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [_summed(parts)] * len(parts)


def _reduce_scatter(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return _split_over(_summed(parts), target, axis, mesh)


def _all_gather(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [_joined_over(parts, source, axis, mesh)] * len(parts)


def _all_to_all(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return _split_over(_joined_over(parts, source, axis, mesh), target, axis, mesh)


def _shard(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [_split_over(part, target, axis, mesh)[at] for at, part in enumerate(parts)]


def _first(parts: list[Tensor], source: TensorType, target: TensorType, axis: str, mesh: Mesh) -> list[Tensor]:
    return [parts[0], *(torch.zeros_like(part) for part in parts[1:])]


_CARRIED_OUT: Final[Mapping[str, Collective]] = {
    ALL_REDUCE: _all_reduce,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_GATHER: _all_gather,
    ALL_TO_ALL: _all_to_all,
    SHARD: _shard,
    FIRST: _first,
}
"""What the ranks of one group along an axis hold after each collective, in order of their coordinate."""


def _ints(op: Op, *names: str) -> list[int]:
    values = [op.attrs[name] for name in names]
    return [value for value in values if isinstance(value, int)]


def _part(op: Op, operands: list[Tensor], mesh: Mesh) -> Tensor:
    dim, stride, count, index = _ints(op, "dim", "stride", "count", "index")
    return take_digit(operands[0], dim, stride, count, index)


def _join(op: Op, operands: list[Tensor], mesh: Mesh) -> Tensor:
    dim, stride = _ints(op, "dim", "stride")
    return put_digits(operands, dim, stride)


def _accumulate(op: Op, operands: list[Tensor], mesh: Mesh) -> Tensor:
    """The sum so far, if there is one, and one part more, added in the wider of their types; zeros where both lack."""
    kind = op.results[0].type
    begun = sum(operands[1:], operands[0]) if operands else torch.zeros(kind.local_shape(mesh))
    return begun.to(DTYPES[kind.dtype])


MOVES_IN_TIME: Final[Mapping[str, Callable[[Op, list[Tensor], Mesh], Tensor]]] = {
    PART: _part,
    JOIN: _join,
    ACCUMULATE: _accumulate,
}
"""What one rank does to its own parts for micro-batches."""
