"""An eager op as a worker runs it: said once, then called by number with buffers and scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moaic.runtime.codegen.memory_order import ordered
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.aten_schema import signature
from moaic.runtime.protocol.operation import ArgSpec, Operation, ViewGeometry, positions, read_as
from moaic.runtime.worker.reduction import Combiner


class EagerOp:
    """An operation, ready to be run by one worker on its table of buffers."""

    def __init__(self, operation: Operation, context: WorkerContext) -> None:
        self._operation = operation
        plan = operation.combination
        self._combiner = None if plan is None else Combiner(plan, context)
        called = signature(operation.op)
        self._call = ordered(called.overload)
        self._device = context.device
        self._made_on = {"device": context.device} if called.nullary and called.takes_device else {}
        self._present = [context.rank in ranks for ranks in operation.ranks]
        self._is_plain = all(geometry is None for geometry in operation.geometries) and all(self._present)
        self._here = _positions_here(operation, self._present)
        self.name = operation.op
        self.together = self._combiner.together if self._combiner is not None else ()
        """Ranks that do it together, if they do."""

    def written(self, ids: Sequence[int]) -> list[int]:
        """Those of the operands that the op writes."""
        operation = self._operation
        found = positions(operation.op, operation.args, operation.kwargs)
        return [buffer_id for buffer_id, (_, is_written) in zip(ids, found, strict=True) if is_written]

    def run(self, table: dict[int, Tensor], ids: Sequence[int], scalars: Sequence[Any], outputs: Sequence[int]) -> None:
        """Runs the op; its results, in order, become the buffers `outputs`."""
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
        found = _listed(self._result(table, ids, scalars)) if any(self._present) else []
        if combiner.takes_part:
            table.update(zip(outputs, combiner.run(found), strict=True))

    def _result(self, table: dict[int, Tensor], ids: Sequence[int], scalars: Sequence[Any]) -> Any:
        tensors = [table[buffer_id] for buffer_id in ids] if self._is_plain else self._views(table, ids)
        supply = _Supply(iter(tensors), iter(scalars), self._here, self._device)
        args = [_argument(part, supply) for part in self._operation.args]
        kwargs = {name: _argument(part, supply) for name, part in self._operation.kwargs}
        kwargs |= self._made_on
        return self._call(*args, **kwargs)

    def _views(self, table: dict[int, Tensor], ids: Sequence[int]) -> list[Tensor | None]:
        return [
            (table[buffer_id] if geometry is None else view(table, buffer_id, geometry)) if present else None
            for buffer_id, geometry, present in zip(ids, self._operation.geometries, self._present, strict=True)
        ]

    def _keep(self, table: dict[int, Tensor], result: Any, outputs: Sequence[int]) -> None:
        results = _listed(result)
        table.update(zip(self._held(outputs, len(results)), results, strict=False))

    def _held(self, outputs: Sequence[int], count: int) -> Sequence[int]:
        """Outputs of the list positions that this worker takes part in."""
        if len(outputs) == count or len(outputs) > len(self._present):
            return outputs
        return [buffer_id for buffer_id, present in zip(outputs, self._present, strict=False) if present]


def _positions_here(operation: Operation, present: Sequence[bool]) -> Sequence[bool]:
    """For every position of the op's lists of tensors whether this worker has those tensors."""
    before = 0
    for part in (*operation.args, *(part for _, part in operation.kwargs)):
        if part[0] == "views":
            return present[before : before + part[1]]
        before += part[0] == "view"
    return ()


def _listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [tensor for tensor in result if tensor is not None]


class _Supply(NamedTuple):
    tensors: Iterator[Tensor | None]
    scalars: Iterator[Any]
    here: Sequence[bool]
    device: torch.device


def _argument(part: ArgSpec, supply: _Supply) -> Any:
    return _ARGUMENTS[part[0]](part, supply)


def _views_argument(part: ArgSpec, supply: _Supply) -> list[Tensor]:
    taken = [next(supply.tensors) for _ in range(part[1])]
    return [tensor for tensor in taken if tensor is not None]


def _scalars_argument(part: ArgSpec, supply: _Supply) -> list[Any]:
    """A list of numbers; one that goes with lists of tensors is as short as they are here."""
    taken = [next(supply.scalars) for _ in range(part[1])]
    if len(taken) != len(supply.here):
        return taken
    return [scalar for scalar, here in zip(taken, supply.here, strict=True) if here]


def _number_argument(part: ArgSpec, supply: _Supply) -> Tensor:
    """Filled where it is, as copying it from the host would wait for all that a GPU has to do before."""
    return torch.full((), _argument(part[2], supply), dtype=DTYPES[part[1]], device=supply.device)


_ARGUMENTS: Mapping[str, Callable[[ArgSpec, _Supply], Any]] = {
    "view": lambda _, supply: next(supply.tensors),
    "views": _views_argument,
    "scalar": lambda _, supply: next(supply.scalars),
    "scalars": _scalars_argument,
    "complex": lambda _, supply: complex(next(supply.scalars), next(supply.scalars)),
    "number": _number_argument,
    "dtype": lambda part, _: DTYPES[part[1]],
    "literal": lambda part, _: part[1],
    "list": lambda part, supply: [_argument(each, supply) for each in part[1]],
}


def view(table: dict[int, Tensor], buffer_id: int, geometry: ViewGeometry) -> Tensor:
    """A view into a whole buffer, which is given the memory order that the geometry counts on where it has another."""
    tensor = table[buffer_id]
    if not _lies_so(tensor, geometry.base):
        ordered = torch.empty_strided(tensor.shape, geometry.base, dtype=tensor.dtype, device=tensor.device)
        tensor = table[buffer_id] = ordered.copy_(tensor)
    return read_as(tensor, DTYPES[geometry.dtype], geometry.shape, geometry.strides, geometry.offset)


def _lies_so(tensor: Tensor, strides: Sequence[int]) -> bool:
    if tensor.storage_offset():
        return False
    return all(size <= 1 or old == new for size, old, new in zip(tensor.shape, tensor.stride(), strides, strict=True))
