"""Deferred forwards, and the readers of buffers between a forward and its backward: both come before a write.

A forward is deferred until its backward comes, and both run as one program; reading a value of it before forces it.
Where forward and backward run as two programs, the backward reads buffers that are copied before they are written.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from moaic.runtime.controller.buffer import Buffer, whole
from moaic.runtime.controller.buffers import Buffers
from moaic.runtime.controller.deferred_forward import DeferredForward
from moaic.runtime.controller.eager_call import EagerCall, take_apart
from moaic.runtime.controller.eager_ops import EagerOps


class ForwardReader(Protocol):
    """A call of a forward whose backward will read buffers that the user may overwrite; it reads while it exists."""

    def reads(self, buffer: Buffer) -> bool: ...

    def replace(self, buffer: Buffer, copy: Buffer) -> None:
        """Read `copy` instead of `buffer` from now on."""
        ...


class Deferral:
    """The pending forward of an accelerator, and the readers of its buffers."""

    def __init__(self, buffers: Buffers, eager: EagerOps) -> None:
        self._buffers = buffers
        self._eager = eager
        self._readers: list[weakref.ref[ForwardReader]] = []
        self.pending: DeferredForward | None = None

    def defer(self, forward: DeferredForward) -> None:
        """Registers a pending forward; one that is still pending is run first."""
        self.force_pending()
        self.pending = forward
        forward.register(self._withdraw)

    def add_reader(self, reader: ForwardReader) -> None:
        self._readers.append(weakref.ref(reader))

    def launch(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        """Launches an eager op, or defers it if it reads results of the pending forward."""
        if self.pending is None and not self._readers:
            self._eager.launch(call, outputs)
        elif self.pending is None or not self._deferred(call, outputs):
            self._launch(call, outputs)

    def _launch(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        if self._readers and self._live_readers():
            self._save_kept(call.written())
        self._eager.launch(call, outputs)

    def _withdraw(self) -> None:
        self.pending = None

    def force_pending(self) -> None:
        if self.pending is not None:
            self.pending.force()

    def force(self, buffer: Buffer) -> None:
        """Runs the forward that makes the value of `buffer`, if it is deferred."""
        if buffer.promise is not None:
            buffer.promise.force()

    def about_to_write(self, buffer: Buffer) -> None:
        """Prepares a write: runs a pending forward that reads or writes `buffer`, and gives its readers a copy."""
        pending = self.pending
        if pending is not None and not pending.running and (pending.reads(buffer) or pending.makes(buffer)):
            pending.force()
        self._save_kept([buffer])

    def _live_readers(self) -> list[ForwardReader]:
        live = [(each, reader) for each in self._readers if (reader := each()) is not None]
        self._readers = [each for each, _ in live]
        return [reader for _, reader in live]

    def _save_kept(self, written: Iterable[Buffer]) -> None:
        """Gives the readers of each buffer in `written` a copy of its present value."""
        live = self._live_readers()
        for buffer in written if live else ():
            readers = [each for each in live if each.reads(buffer)]
            if readers:
                copy = self._copied(buffer)
                for each in readers:
                    each.replace(buffer, copy)

    def _copied(self, buffer: Buffer) -> Buffer:
        copy = self._buffers.make(buffer.dtype, buffer.shape, buffer.strides)
        if buffer.place is None:
            copy.host, copy.fill = buffer.host, buffer.fill
        else:
            self._launch(take_apart("aten.clone", (whole(buffer),), {}, (copy.geometry,)), (copy,))
        return copy

    def clear_the_way(
        self, inputs: Iterable[Buffer], outputs: Iterable[Buffer | None], fulfils: DeferredForward | None
    ) -> None:
        """Runs the pending forward if a program reads its results or would overwrite its inputs."""
        pending = self.pending
        if pending is None or fulfils is pending:
            # Commands deferred behind the pending forward may overwrite its inputs, but none has run yet.
            return
        written = [buffer for buffer in outputs if buffer is not None]
        if any(buffer.promise is not None for buffer in inputs):
            pending.force()
        elif pending.running or any(pending.makes(buffer) for buffer in written):
            return
        elif any(pending.reads(buffer) for buffer in written):
            pending.force()

    def _deferred(self, call: EagerCall, outputs: Sequence[Buffer]) -> bool:
        """Defers an op that reads deferred results; runs the pending forward if the op would overwrite its inputs."""
        pending = self.pending
        assert pending is not None
        if pending.running:
            return False
        changed = (*call.written(), *outputs)
        if any(buffer.promise is not None for buffer in call.buffers):
            pending.defer(lambda: self._launch(call, outputs), call.buffers, changed)
            return True
        if any(pending.reads(buffer) for buffer in changed):
            pending.force()
        return False
