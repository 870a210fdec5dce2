"""A forward that was asked for and not run yet, and what has been asked for after it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from moaic.runtime.controller.buffer import Buffer


class DeferredForward:
    """Values that will be made by `run`, unless a larger program makes them first.

    Commands that read them, or what such commands will write, are deferred and run once the values are there.
    """

    def __init__(self, run: Callable[[], None], reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        """`reads` must keep their values until then; `writes` are held weakly, so that their end can be seen."""
        self._run: Callable[[], None] | None = run
        self._reads = {buffer.id: buffer for buffer in reads}
        self._writes = {buffer.id: weakref.ref(buffer) for buffer in writes}
        self._deferred: list[Callable[[], None]] = []
        self._withdraw: Callable[[], None] | None = None
        self.running = False
        self.done = False

    def register(self, withdraw: Callable[[], None]) -> None:
        """Marks the buffers as promised; `withdraw` is called when they no longer are."""
        self._withdraw = withdraw
        for buffer in self.writes():
            buffer.promise = self

    def defer(self, command: Callable[[], None], reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        """Runs `command` after the values have been made; what it writes is promised from now on."""
        self._deferred.append(command)
        self._reads.update((buffer.id, buffer) for buffer in reads)
        for buffer in writes:
            self._writes[buffer.id] = weakref.ref(buffer)
            buffer.promise = self

    def writes(self) -> list[Buffer]:
        """What is promised and not yet given up by everyone else."""
        return [buffer for reference in self._writes.values() if (buffer := reference()) is not None]

    def reads(self, buffer: Buffer) -> bool:
        """Whether the value that `buffer` has now is still needed."""
        return buffer.id in self._reads

    def makes(self, buffer: Buffer) -> bool:
        return buffer.id in self._writes

    def force(self) -> None:
        """Makes the values now, by `run`."""
        if self._run is None or self.running:
            return
        self.running = True
        try:
            self._run()
        finally:
            self.running = False
        self.fulfilled()

    def fulfilled(self) -> None:
        """To be called when the values have been made: the deferred commands run, in order."""
        if self.done:
            return
        self.done = True
        # What runs refers to the call that refers to this: without the circle the call ends with its last reference.
        self._run = None
        for buffer in self.writes():
            buffer.promise = None
        if self._withdraw is not None:
            self._withdraw()
        deferred, self._deferred, self._reads, self._writes = self._deferred, [], {}, {}
        for command in deferred:
            command()
