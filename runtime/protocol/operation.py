"""An eager op as sent to workers: defined once, then called by its number with buffers and scalars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from moaic.runtime.protocol.aten_schema import signature
from moaic.runtime.protocol.combination import Combination

ArgSpec = tuple[Any, ...]
"""One argument: ("view",), ("views", n), ("scalar",), ("scalars", n), ("complex",) for two scalars, ("number", dtype,
part) for a 0-dim tensor by value, ("dtype", name), ("literal", value) or ("list", parts). Views and scalars are taken
from their lists, in order."""


class ViewGeometry(NamedTuple):
    """A view of a buffer that the worker holds entirely and that must have the strides `base`.

    The view reads the buffer's bytes as elements of `dtype`, in which `strides` and `offset` count.
    """

    base: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An op, its argument specs, and per view its geometry (None: the whole buffer) and the ranks that take part."""

    op: str
    args: tuple[ArgSpec, ...]
    kwargs: tuple[tuple[str, ArgSpec], ...]
    geometries: tuple[ViewGeometry | None, ...]
    ranks: tuple[tuple[int, ...], ...]
    combination: Combination | None = None
    """The combination of partial results; None if the op's operands are not sharded."""
    default_dtype: str = "f32"
    """PyTorch's default dtype where the op is called."""

    def encoded(self) -> list[Any]:
        combination = None if self.combination is None else self.combination.encoded()
        return [self.op, self.args, self.kwargs, self.geometries, self.ranks, combination, self.default_dtype]

    @staticmethod
    def decoded(data: Any) -> Operation:
        op, args, kwargs, geometries, ranks, combination, default_dtype = data
        return Operation(
            op,
            tuple(_part(part) for part in args),
            tuple((name, _part(part)) for name, part in kwargs),
            tuple(None if each is None else ViewGeometry(*(_tuple(item) for item in each)) for each in geometries),
            tuple(map(tuple, ranks)),
            None if combination is None else Combination.decoded(combination),
            default_dtype,
        )


def _tuple(data: Any) -> Any:
    return tuple(cast("list[int]", data)) if isinstance(data, list) else data


def _part(data: Any) -> ArgSpec:
    kind, *rest = data
    if kind == "list":
        return (kind, tuple(_part(part) for part in rest[0]))
    return (kind, rest[0], _part(rest[1])) if kind == "number" else (kind, *rest)


def positions(op: str, args: Iterable[ArgSpec], kwargs: Iterable[tuple[str, ArgSpec]]) -> Iterator[tuple[int, bool]]:
    """Yield, per view of an op's arguments, its index in a list of tensors (else -1), and whether the op writes it."""
    writes = signature(op).written_keys
    for key, part in (*enumerate(args), *kwargs):
        yield from ((index, key in writes) for index in _indices(part))


def _indices(part: ArgSpec) -> Iterable[int]:
    if part[0] == "view":
        return (-1,)
    if part[0] == "views":
        return range(part[1])
    if part[0] == "list":
        return [index for index, each in enumerate(part[1]) for _ in _indices(each)]
    return ()


def read_as(tensor: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """A view of a tensor that begins at the start of its storage, with elements of any type."""
    if tensor.dtype == dtype:
        return tensor.as_strided(shape, strides, offset)
    blank = torch.empty(0, dtype=dtype, device=tensor.device)
    return blank.set_(tensor.untyped_storage(), offset, shape, strides)
