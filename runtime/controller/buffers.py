"""The life of buffers: creation, upload, resharding, download, release."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.layout import Layout, Mesh
from moaic.runtime.controller.buffer import Buffer, BufferReference, View, reference, row_major, storage_geometry
from moaic.runtime.controller.eager_placement import geometry_of
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.commands import Command, DefineResharding, Fetch, Fill, Free, Put, Request, Reshard
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.operation import read_as
from moaic.runtime.protocol.placement import Placement, alone, owners
from moaic.runtime.protocol.tensor_parts import assemble, local_part
from moaic.runtime.protocol.wire import as_block


class Buffers:
    """The buffers of an accelerator, and the placements and reshardings that workers know. Not thread-safe."""

    def __init__(self, pool: WorkerPool, lines: SourceLines) -> None:
        self.pool: Final = pool
        self.lines: Final = lines
        self._places: dict[Placement, Placement] = {}
        self._reshardings: dict[Resharding, int] = {}
        self._living: dict[int, BufferReference] = {}
        self._dead: deque[BufferReference] = deque()
        """References to buffers that are gone, appended from any thread."""
        self._last_id = 0
        pool.mended = self._mended

    def make(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Buffer:
        """Make a buffer without a value; it is row-major if no strides are given."""
        sizes = tuple(shape)
        geometry = storage_geometry(dtype, sizes, row_major(sizes) if strides is None else tuple(strides))
        self._last_id += 1
        buffer = Buffer(self._last_id, geometry)
        self._living[buffer.id] = reference(buffer, self._dead.append)
        return buffer

    @property
    def living(self) -> int:
        """Number of buffers that have not been freed."""
        return len(self._living)

    def new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def place(self, mesh: Mesh, layout: Layout) -> Placement:
        return self.interned(Placement(mesh, layout))

    def interned(self, place: Placement) -> Placement:
        """The one object for all equal placements."""
        return self._places.setdefault(place, place)

    def materialize(self, buffer: Buffer, place: Placement) -> None:
        """Place a buffer that no worker holds yet and send its value."""
        buffer.place = self.interned(place)
        self.send_value(buffer, buffer.place)

    def send_value(self, buffer: Buffer, place: Placement) -> None:
        """Send each worker its part of the value that a buffer has on the host."""
        shape = list(place.layout.local_shape(buffer.shape, place.mesh))
        line = self.lines.here()
        if buffer.host is None:
            self.pool.push(Fill(line, buffer.id, buffer.dtype, shape, place.holders, buffer.fill))
        else:
            self.pool.put(Put(line, buffer.id, buffer.dtype, shape, 0), self._parts(buffer.host, place))
        buffer.host, buffer.fill = None, None

    def _parts(self, host: Tensor, place: Placement) -> list[Tensor | None]:
        """The bytes of each worker's part; replicas share the same memory."""
        parts: list[Tensor | None] = [None] * self.pool.size
        blocks: dict[tuple[int, ...], Tensor] = {}
        for rank in place.holders:
            coordinates = place.mesh.coordinates(rank)
            key = tuple(coordinates[split.axis] for split in place.layout.splits)
            if key not in blocks:
                blocks[key] = as_block(local_part(host, place.mesh, place.layout, rank))
            parts[rank] = blocks[key]
        return parts

    def resharded(self, buffers: Sequence[tuple[Buffer, Placement]]) -> list[Buffer]:
        """Temporary copies of buffers with these placements; those that the same ranks exchange go together."""
        copies: list[Buffer] = []
        moves: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}
        for buffer, place in buffers:
            copy = self.make(buffer.dtype, buffer.shape, buffer.strides)
            copy.place = self.interned(place)
            resharding = self._change(buffer, place)
            moves.setdefault(resharding.participants, []).append((self.resharding(resharding), buffer.id, copy.id))
            copies.append(copy)
        for together in moves.values():
            self.pool.push(Reshard(self.lines.here(), together))
        return copies

    def reshard_in_place(self, buffer: Buffer, place: Placement) -> None:
        number = self.resharding(self._change(buffer, place))
        self.pool.push(Reshard(self.lines.here(), [(number, buffer.id, buffer.id)]))
        buffer.place = self.interned(place)

    def _change(self, buffer: Buffer, place: Placement) -> Resharding:
        assert buffer.place is not None
        return Resharding(buffer.dtype, buffer.shape, buffer.place, place)

    def resharding(self, resharding: Resharding) -> int:
        """The number of a resharding, after defining it on the workers if it is new."""
        number = self._reshardings.get(resharding)
        if number is None:
            number = self._reshardings[resharding] = len(self._reshardings)
            self.pool.push(DefineResharding(self.lines.here(), number, resharding.encoded()))
        return number

    def fetch(self, view: View) -> Tensor:
        """The value of a view, row-major, from the workers or from the host."""
        buffer = view.buffer
        if buffer.place is None:
            return _on_host(view)
        place = buffer.place
        if place.layout.partial:
            place = place.whole()
            (buffer,) = self.resharded([(buffer, place)])
        return self._fetched(view, buffer, place)

    def _fetched(self, view: View, buffer: Buffer, place: Placement) -> Tensor:
        line = self.lines.here()
        self.free_dead()
        if place.is_uncut:
            first = place.holders[0]
            return self.pool.ask(Fetch(line, buffer.id, geometry_of(view), [first]), [first])[first]
        ranks = owners(place)
        parts = self.pool.ask(Fetch(line, buffer.id, None, ranks), ranks)
        value = assemble(lambda rank: parts[rank], buffer.shape, place.mesh, place.layout)
        return value if view.is_whole else _seen(value, view)

    def _mended(self, latest: Mapping[int, int]) -> dict[int, Command]:
        """By id of the buffers that are replicated: the command that copies the value of a rank to all holders."""
        commands: dict[int, Command] = {}
        for buffer_id, rank in latest.items():
            buffer = self._living[buffer_id]() if buffer_id in self._living else None
            if buffer is not None and buffer.place is not None and buffer.place.is_uncut:
                before = alone(rank, self.pool.size)
                number = self.resharding(Resharding(buffer.dtype, buffer.shape, before, buffer.place))
                commands[buffer.id] = Reshard(-1, [(number, buffer.id, buffer.id)])
        return commands

    def free_dead(self) -> None:
        """Queue the release of buffers without references."""
        if self._dead:
            dead = [self._dead.popleft().id for _ in range(len(self._dead))]
            for buffer_id in dead:
                self._living.pop(buffer_id, None)
            self.pool.push(Free(-1, dead))

    def flush(self) -> None:
        self.free_dead()
        self.pool.flush()

    def ask_all(self, request: Request) -> dict[int, Any]:
        """The answers of all workers after all earlier commands."""
        self.free_dead()
        return self.pool.ask(request, range(self.pool.size))


def _seen(value: Tensor, view: View) -> Tensor:
    """The elements of a view, read from the value of its buffer."""
    base = torch.empty_strided(view.buffer.shape, view.buffer.strides, dtype=value.dtype).copy_(value)
    return read_as(base, view.dtype, view.shape, view.strides, view.offset).contiguous()


def _on_host(view: View) -> Tensor:
    """The value of a buffer that has not been sent yet."""
    buffer = view.buffer
    host = buffer.host
    if host is None:
        host = torch.full(buffer.shape, 0 if buffer.fill is None else buffer.fill, dtype=DTYPES[buffer.dtype])
    return _seen(host, view).clone()
