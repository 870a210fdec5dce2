"""The reference interpreter: defines the meaning of a module by running it op by op in PyTorch on the CPU.

`run_function` runs a function on global tensors and ignores layouts. `run_ranks` runs a partitioned module or a program
on virtual ranks in one process, all ranks in lockstep, with collectives as plain array operations. It is the oracle of
all passes that shard, move or reorder values: both functions must agree for every plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module, Op, Value
from moaic.ir.localize import localize
from moaic.ir.op_names import SEND
from moaic.ir.ops import Kind, kind_of
from moaic.ir.ring_attention import attention_of, is_ring
from moaic.ir.types import TensorType
from moaic.runtime.codegen.lower_to_fx import last_uses, operand_of, run_op, run_ops
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.rank_arrays import (
    ABSENT,
    COLLECTIVES,
    LOCAL_INSTRUCTIONS,
    PerRank,
    gather,
    joined_over,
    scatter,
    split_over,
)


def run_function(module: Module, name: str, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a function on global tensors; layouts and collectives do not change values."""
    with torch.no_grad():
        return _run_whole(module, module.function(name), inputs)


def run_ranks(module: Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of the main function for global tensors, scattered and gathered by their layouts."""
    main = module.main
    parts = [scatter(tensor, param.type, module.mesh) for tensor, param in zip(inputs, main.params, strict=True)]
    results = run_parts(module, parts)
    pairs = zip(results, main.results, strict=True)
    return [gather(result, value.type, module.mesh) for result, value in pairs]


def run_parts(module: Module, inputs: Sequence[PerRank], name: str = "") -> list[PerRank]:
    """The results of a function, by default the main one; parameters and results as the parts of all ranks."""
    with torch.no_grad():
        function = module.function(name) if name else module.main
        work = _Ranks(module)
        return work.run(function, inputs, work.everyone)


# Global tensors.


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
    if op.name in COLLECTIVES or op.name == SEND:
        return operands
    if is_ring(op):
        return run_op(attention_of(op), operands)
    if op.name not in LOCAL_INSTRUCTIONS:
        return run_op(op, operands)
    if module.mesh.ranks > 1:
        raise Diagnostic(f"`{op.name}` acts on the part of one rank: run the program on ranks, not on global tensors")
    return [LOCAL_INSTRUCTIONS[op.name](op, operands, module.mesh)]


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
    """Runs a module on the ranks of its mesh. Each function and op is localized once."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.mesh = module.mesh
        self.places = [self.mesh.coordinates(rank) for rank in range(self.mesh.ranks)]
        self.everyone = list(range(self.mesh.ranks))
        self.local: dict[Function | Op, Function] = {}

    def run(self, function: Function, inputs: Sequence[PerRank], ranks: Sequence[int]) -> list[PerRank]:
        """Run a function on these ranks; its results are absent on all others."""
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
        if op.name in COLLECTIVES:
            return [self._collective(op, operands[0], there)]
        if is_ring(op):
            return self._ring(op, values, there)
        if op.name in LOCAL_INSTRUCTIONS:
            moved = self._absent()
            for rank in there:
                moved[rank] = LOCAL_INSTRUCTIONS[op.name](op, [parts[rank] for parts in operands], self.module.mesh)
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
                results = COLLECTIVES[op.name](given, source, target, axis, self.mesh)
                for member, result in zip(group, results, strict=True):
                    made[member] = result
        return made

    def _ring(self, op: Op, values: Mapping[Value, PerRank], ranks: Sequence[int]) -> list[PerRank]:
        """Run ring attention as attention over all blocks at once, and cut the results into blocks again."""
        axis = str(op.attrs["axis"])
        made = [self._absent() for _ in op.results]
        for rank in ranks:
            group = self.mesh.group(rank, axis)
            if rank != group[0]:
                continue
            joined = {value: self._joined(values[value], group, value.type, axis) for value in op.inputs()}
            results = run_op(attention_of(op), [operand_of(operand, joined) for operand in op.operands])
            for parts, value, whole in zip(made, op.results, results, strict=True):
                for member, part in zip(group, split_over(whole, value.type, axis, self.mesh), strict=True):
                    parts[member] = part
        return made

    def _joined(self, parts: PerRank, group: Sequence[int], type_: TensorType, axis: str) -> Tensor:
        """The parts of a group along the axis, joined."""
        if type_.layout.split_of(axis) is None:
            return parts[group[0]]
        return joined_over([parts[member] for member in group], type_, axis, self.mesh)

    def _send(self, op: Op, parts: PerRank) -> PerRank:
        """Copy the parts of the owner to the ranks that differ from it on the axis alone."""
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
