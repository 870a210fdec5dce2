"""An eager op as a worker runs it: said once, then called by number with buffers and scalars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moaic.runtime.orders import ordered
from moaic.runtime.reduction import Combination, Combiner
from moaic.runtime.schema import DTYPES, signature, written
from moaic.runtime.station import Station

Part = tuple[Any, ...]
"""One argument: ("view",), ("views", n), ("scalar",), ("scalars", n), ("complex",) for two scalars, ("number", dtype,
part) for a 0-dim tensor by value, ("dtype", name), ("literal", value) or ("list", parts). Views and scalars are taken
from their lists, in order."""


class Geometry(NamedTuple):
    """A view into a buffer that the worker holds whole; `base` are the strides that the buffer must have for it.

    `strides` and `offset` are in elements of `dtype`, as which the buffer's bytes are read.
    """

    base: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An op, the form of its arguments, and per view its geometry (None: the whole buffer) and who takes part."""

    op: str
    args: tuple[Part, ...]
    kwargs: tuple[tuple[str, Part], ...]
    geometries: tuple[Geometry | None, ...]
    ranks: tuple[tuple[int, ...], ...]
    combination: Combination | None = None
    """What becomes of the results, if they are those of parts."""

    def encoded(self) -> list[Any]:
        combination = None if self.combination is None else self.combination.encoded()
        return [self.op, self.args, self.kwargs, self.geometries, self.ranks, combination]

    @staticmethod
    def decoded(data: Any) -> Operation:
        op, args, kwargs, geometries, ranks, combination = data
        return Operation(
            op,
            tuple(_part(part) for part in args),
            tuple((name, _part(part)) for name, part in kwargs),
            tuple(None if each is None else Geometry(*(_tuple(item) for item in each)) for each in geometries),
            tuple(map(tuple, ranks)),
            None if combination is None else Combination.decoded(combination),
        )


def _tuple(data: Any) -> Any:
    return tuple(cast("list[int]", data)) if isinstance(data, list) else data


def _part(data: Any) -> Part:
    kind, *rest = data
    if kind == "list":
        return (kind, tuple(_part(part) for part in rest[0]))
    return (kind, rest[0], _part(rest[1])) if kind == "number" else (kind, *rest)


def positions(op: str, args: Iterable[Part], kwargs: Iterable[tuple[str, Part]]) -> Iterator[tuple[int, bool]]:
    """Per view of an op's arguments: its index in a list of tensors or -1, and whether the op writes it."""
    writes = written(op)
    for key, part in (*enumerate(args), *kwargs):
        yield from ((index, key in writes) for index in _indices(part))


def _indices(part: Part) -> Iterable[int]:
    if part[0] == "view":
        return (-1,)
    if part[0] == "views":
        return range(part[1])
    if part[0] == "list":
        return [index for index, each in enumerate(part[1]) for _ in _indices(each)]
    return ()


class Operator:
    """An operation, ready to be run by one worker on its table of buffers."""

    def __init__(self, operation: Operation, station: Station) -> None:
        self._operation = operation
        plan = operation.combination
        self._combiner = None if plan is None else Combiner(plan, station)
        called = signature(operation.op)
        self._call = ordered(called.overload)
        self._device = station.device
        self._made_on = {"device": station.device} if called.nullary and called.takes_device else {}
        self._present = [station.rank in ranks for ranks in operation.ranks]
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


def _argument(part: Part, supply: _Supply) -> Any:
    return _ARGUMENTS[part[0]](part, supply)


def _views_argument(part: Part, supply: _Supply) -> list[Tensor]:
    taken = [next(supply.tensors) for _ in range(part[1])]
    return [tensor for tensor in taken if tensor is not None]


def _scalars_argument(part: Part, supply: _Supply) -> list[Any]:
    """A list of numbers; one that goes with lists of tensors is as short as they are here."""
    taken = [next(supply.scalars) for _ in range(part[1])]
    if len(taken) != len(supply.here):
        return taken
    return [scalar for scalar, here in zip(taken, supply.here, strict=True) if here]


def _number_argument(part: Part, supply: _Supply) -> Tensor:
    """Filled where it is, as copying it from the host would wait for all that a GPU has to do before."""
    return torch.full((), _argument(part[2], supply), dtype=DTYPES[part[1]], device=supply.device)


_ARGUMENTS: Mapping[str, Callable[[Part, _Supply], Any]] = {
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


def view(table: dict[int, Tensor], buffer_id: int, geometry: Geometry) -> Tensor:
    """A view into a whole buffer, which is given the memory order that the geometry counts on where it has another."""
    tensor = table[buffer_id]
    if not _lies_so(tensor, geometry.base):
        ordered = torch.empty_strided(tensor.shape, geometry.base, dtype=tensor.dtype, device=tensor.device)
        tensor = table[buffer_id] = ordered.copy_(tensor)
    return read_as(tensor, DTYPES[geometry.dtype], geometry.shape, geometry.strides, geometry.offset)


def read_as(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """The memory of a tensor that begins with its storage, as elements of any type."""
    if tensor.dtype == dtype:
        return tensor.as_strided(shape, strides, offset)
    blank = torch.empty(0, dtype=dtype, device=tensor.device)
    return blank.set_(tensor.untyped_storage(), offset, shape, strides)


def _lies_so(tensor: Tensor, strides: Sequence[int]) -> bool:
    if tensor.storage_offset():
        return False
    return all(size <= 1 or old == new for size, old, new in zip(tensor.shape, tensor.stride(), strides, strict=True))
