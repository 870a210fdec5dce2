"""Eager ops on a worker: defined once, then called by number with buffers and scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moaic.runtime.codegen.memory_order import ordered
from moaic.runtime.codegen.narrow_on_cpu import widened
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.gpus import CPU
from moaic.runtime.protocol.aten_schema import Signature, signature
from moaic.runtime.protocol.operation import ArgSpec, Operation, ViewGeometry, positions, read_as
from moaic.runtime.worker.reduction import Combiner


class EagerOp:
    """An operation, prepared for one worker and its table of buffers."""

    def __init__(self, operation: Operation, context: WorkerContext) -> None:
        self._operation = operation
        plan = operation.combination
        self._combiner = None if plan is None else Combiner(plan, context)
        called = signature(operation.op)
        call = widened(called.overload) if context.device.type == CPU else ordered(called.overload)
        self._call = _asked_for(called, _with_default(call, DTYPES[operation.default_dtype]))
        self._device = context.device
        self._unpadded = plan.unpadded if plan is not None and any(plan.unpadded) else ()
        self._rank = context.rank
        self._made_on = {"device": context.device} if called.nullary and called.takes_device else {}
        self._present = [context.rank in ranks for ranks in operation.ranks]
        self._is_plain = all(geometry is None for geometry in operation.geometries) and all(self._present)
        self._is_held = _held_positions(operation, self._present)
        self.name = operation.op
        self.together = self._combiner.together if self._combiner is not None else ()
        """The ranks that run the op together; empty if each runs it alone."""

    def written(self, ids: Sequence[int]) -> list[int]:
        """The operands that the op writes."""
        operation = self._operation
        operands = positions(operation.op, operation.args, operation.kwargs)
        return [buffer_id for buffer_id, (_, is_written) in zip(ids, operands, strict=True) if is_written]

    def run(self, table: dict[int, Tensor], ids: Sequence[int], scalars: Sequence[Any], outputs: Sequence[int]) -> None:
        """Run the op; its results, in order, become the buffers `outputs`."""
        if self._combiner is not None:
            self._combine(self._combiner, table, ids, scalars, outputs)
        elif not self._present or any(self._present):
            result = self._result(table, ids, scalars)
            if outputs:
                self._keep(table, result, outputs)

    def _combine(
        self,
        combiner: Combiner,
        table: dict[int, Tensor],
        ids: Sequence[int],
        scalars: Sequence[Any],
        outputs: Sequence[int],
    ) -> None:
        partial = _listed(self._result(table, ids, scalars)) if any(self._present) else []
        if combiner.takes_part:
            table.update(zip(outputs, combiner.run(partial), strict=True))

    def _result(self, table: dict[int, Tensor], ids: Sequence[int], scalars: Sequence[Any]) -> Any:
        tensors = [table[buffer_id] for buffer_id in ids] if self._is_plain else self._views(table, ids)
        if self._unpadded:
            tensors = [self._without_padding(tensor, index) for index, tensor in enumerate(tensors)]
        source = _ArgumentSource(iter(tensors), iter(scalars), self._is_held, self._device)
        args = [_argument(part, source) for part in self._operation.args]
        kwargs = {name: _argument(part, source) for name, part in self._operation.kwargs}
        kwargs |= self._made_on
        return self._call(*args, **kwargs)

    def _without_padding(self, tensor: Tensor | None, index: int) -> Tensor | None:
        if tensor is None:
            return None
        for dim, sizes in self._unpadded[index]:
            tensor = tensor.narrow(dim, 0, sizes[self._rank])
        return tensor

    def _views(self, table: dict[int, Tensor], ids: Sequence[int]) -> list[Tensor | None]:
        return [
            (table[buffer_id] if geometry is None else view(table, buffer_id, geometry)) if present else None
            for buffer_id, geometry, present in zip(ids, self._operation.geometries, self._present, strict=True)
        ]

    def _keep(self, table: dict[int, Tensor], result: Any, outputs: Sequence[int]) -> None:
        results = _listed(result)
        table.update(zip(self._held(outputs, len(results)), results, strict=False))

    def _held(self, outputs: Sequence[int], count: int) -> Sequence[int]:
        """The outputs at the list positions whose tensors this worker holds."""
        if len(outputs) == count or len(outputs) > len(self._present):
            return outputs
        return [buffer_id for buffer_id, present in zip(outputs, self._present, strict=False) if present]


def _asked_for(called: Signature, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call without results that its arguments do not ask for; decided here, as few ops have such arguments."""
    if called.mask is None:
        return call
    return lambda *args, **kwargs: called.asked_for(call(*args, **kwargs), args, kwargs)


def _with_default(call: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """The call under this default dtype: that of `arange(3.)`, and of the quotient of integers."""
    usual = torch.get_default_dtype()
    if dtype == usual:
        return call

    def under_default(*args: Any, **kwargs: Any) -> Any:
        torch.set_default_dtype(dtype)
        try:
            return call(*args, **kwargs)
        finally:
            torch.set_default_dtype(usual)

    return under_default


def _held_positions(operation: Operation, present: Sequence[bool]) -> Sequence[bool]:
    """For every position of the op's lists of tensors, whether this worker holds the tensors at it."""
    before = 0
    for part in (*operation.args, *(part for _, part in operation.kwargs)):
        if part[0] == "views":
            return present[before : before + part[1]]
        before += part[0] == "view"
    return ()


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for tensor in result if tensor is not None]


class _ArgumentSource(NamedTuple):
    """The tensors and scalars of a call, from which its arguments are taken in order."""

    tensors: Iterator[Tensor | None]
    scalars: Iterator[Any]
    is_held: Sequence[bool]
    device: torch.device


def _argument(part: ArgSpec, source: _ArgumentSource) -> Any:
    return _ARGUMENTS[part[0]](part, source)


def _views_argument(part: ArgSpec, source: _ArgumentSource) -> list[Tensor]:
    taken = [next(source.tensors) for _ in range(part[1])]
    return [tensor for tensor in taken if tensor is not None]


def _scalars_argument(part: ArgSpec, source: _ArgumentSource) -> list[Any]:
    """A list of numbers; one that runs parallel to lists of tensors has only the positions held here."""
    taken = [next(source.scalars) for _ in range(part[1])]
    if len(taken) != len(source.is_held):
        return taken
    return [scalar for scalar, is_held in zip(taken, source.is_held, strict=True) if is_held]


def _number_argument(part: ArgSpec, source: _ArgumentSource) -> Tensor:
    """A 0-dim tensor, filled on the device: a copy from the host would wait for all queued kernels of a GPU."""
    return torch.full((), _argument(part[2], source), dtype=DTYPES[part[1]], device=source.device)


_ARGUMENTS: Mapping[str, Callable[[ArgSpec, _ArgumentSource], Any]] = {
    "view": lambda _, source: next(source.tensors),
    "views": _views_argument,
    "scalar": lambda _, source: next(source.scalars),
    "scalars": _scalars_argument,
    "complex": lambda _, source: complex(next(source.scalars), next(source.scalars)),
    "number": _number_argument,
    "dtype": lambda part, _: DTYPES[part[1]],
    "literal": lambda part, _: part[1],
    "list": lambda part, source: [_argument(each, source) for each in part[1]],
}


def view(table: dict[int, Tensor], buffer_id: int, geometry: ViewGeometry) -> Tensor:
    """A view of a whole buffer, whose memory is first reordered if its strides are not those of the geometry."""
    tensor = table[buffer_id]
    if not _has_strides(tensor, geometry.base):
        ordered = torch.empty_strided(tensor.shape, geometry.base, dtype=tensor.dtype, device=tensor.device)
        tensor = table[buffer_id] = ordered.copy_(tensor)
    return read_as(tensor, DTYPES[geometry.dtype], geometry.shape, geometry.strides, geometry.offset)


def _has_strides(tensor: Tensor, strides: Sequence[int]) -> bool:
    if tensor.storage_offset():
        return False
    return all(size <= 1 or old == new for size, old, new in zip(tensor.shape, tensor.stride(), strides, strict=True))
