"""A forward that the user has called and no worker has run yet, and the commands deferred behind it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from moaic.runtime.controller.buffer import Buffer


class DeferredForward:
    """The results of a forward, computed by `run` unless a joint program computes them first.

    Commands that read these results, or results of such commands, are deferred and run after the forward.
    """

    def __init__(self, run: Callable[[], None], reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        """`reads` must keep their values until the forward runs; `writes` are referenced weakly, to see their end."""
        self._run: Callable[[], None] | None = run
        self._reads = {buffer.id: buffer for buffer in reads}
        self._writes = {buffer.id: weakref.ref(buffer) for buffer in writes}
        self._deferred: list[Callable[[], None]] = []
        self._withdraw: Callable[[], None] | None = None
        self.running = False
        self.done = False

    def register(self, withdraw: Callable[[], None]) -> None:
        """Marks the results as deferred; `withdraw` is called once they are computed."""
        self._withdraw = withdraw
        for buffer in self.writes():
            buffer.promise = self

    def defer(self, command: Callable[[], None], reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        """Runs `command` after the forward; the buffers that it writes are deferred, too."""
        self._deferred.append(command)
        self._reads.update((buffer.id, buffer) for buffer in reads)
        for buffer in writes:
            self._writes[buffer.id] = weakref.ref(buffer)
            buffer.promise = self

    def writes(self) -> list[Buffer]:
        """The deferred buffers that are still referenced."""
        return [buffer for reference in self._writes.values() if (buffer := reference()) is not None]

    def reads(self, buffer: Buffer) -> bool:
        """Whether the forward or a deferred command reads the present value of `buffer`."""
        return buffer.id in self._reads

    def makes(self, buffer: Buffer) -> bool:
        return buffer.id in self._writes

    def force(self) -> None:
        """Runs the forward alone, now."""
        if self._run is None or self.running:
            return
        self.running = True
        try:
            self._run()
        finally:
            self.running = False
        self.fulfilled()

    def fulfilled(self) -> None:
        """Runs the deferred commands in order; to be called once the results are computed."""
        if self.done:
            return
        self.done = True
        # `_run` refers to the call, which refers to this object: without the cycle, the last reference frees the call.
        self._run = None
        for buffer in self.writes():
            buffer.promise = None
        if self._withdraw is not None:
            self._withdraw()
        deferred, self._deferred, self._reads, self._writes = self._deferred, [], {}, {}
        for command in deferred:
            command()
