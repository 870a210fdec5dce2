"""Buffers and views: the controller's handles of data that the workers hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.placement import Placement

if TYPE_CHECKING:
    from moaic.runtime.controller.deferred_forward import DeferredForward


@dataclass(frozen=True, slots=True, eq=False)
class StorageGeometry:
    """Element type, shape and strides of a storage's first tensor. Made by `storage_geometry`."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""


storage_geometry: Final = lru_cache(1 << 16)(StorageGeometry)
"""One object for equal geometries, so that the keys of caches compare them by identity."""


class Buffer:
    """One storage of the virtual accelerator; equal only to itself. Made by `Accelerator.buffer`.

    While `place` is None the workers hold no part of it: the value is `host`, or `fill` in every element, or undefined.
    With a `promise` the value is pending: a deferred forward computes it.
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "fill",
        "geometry",
        "host",
        "id",
        "place",
        "promise",
        "rests",
        "shape",
        "strides",
    )

    def __init__(self, number: int, geometry: StorageGeometry) -> None:
        self.id = number
        self.dtype = geometry.dtype
        self.shape = geometry.shape
        self.strides = geometry.strides
        self.geometry = geometry
        self.place: Placement | None = None
        self.host: Tensor | None = None
        self.fill: bool | int | float | None = None
        self.promise: DeferredForward | None = None
        self.rests = False
        """Whether it is a parameter or buffer of a model in training, which stays in the layout of its programs."""

    def __repr__(self) -> str:
        shape = ", ".join(str(size) for size in self.shape)
        return f"Buffer({self.id}, {self.dtype}[{shape}])"


class BufferReference(ref[Buffer]):
    """A weak reference that knows its buffer's id, also when the buffer is gone. Made by `reference`."""

    __slots__ = ("id",)

    id: int


def reference(buffer: Buffer, callback: Callable[[BufferReference], None]) -> BufferReference:
    """A reference with a callback in C: in one of Python, or in a `__del__`, a KeyboardInterrupt would be lost."""
    made = BufferReference(buffer, callback)
    made.id = buffer.id
    return made


class View(NamedTuple):
    """A tensor of the device: a buffer seen through a geometry, offset and strides in elements of `dtype`."""

    buffer: Buffer
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    """The element type in which the buffer's bytes are read; another than the buffer's for a `view(dtype)`."""

    @property
    def is_whole(self) -> bool:
        """Whether this is the buffer's first tensor."""
        buffer = self.buffer
        is_first = not self.offset and self.shape == buffer.shape and self.strides == buffer.strides
        return is_first and self.dtype is DTYPES[buffer.dtype]


def whole(buffer: Buffer) -> View:
    """The buffer's first tensor."""
    return View(buffer, buffer.shape, buffer.strides, 0, DTYPES[buffer.dtype])


@lru_cache(4096)
def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
