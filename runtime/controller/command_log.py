"""The command log: all commands sent to the workers, as a value that fresh workers can replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from moaic.runtime.protocol.frames import decode, encode


@dataclass(frozen=True, slots=True)
class LogEntry:
    """The commands of one message without its requests, and the blocks sent to each worker with them."""

    sequence: int
    """Number of the first command; commands are counted over the whole life of the workers."""
    commands: tuple[Any, ...]
    blocks: tuple[tuple[bytes | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Log:
    """All commands sent to a number of workers, in order."""

    workers: int
    entries: tuple[LogEntry, ...] = ()

    def encoded(self) -> bytes:
        rows = [[entry.sequence, entry.commands, entry.blocks] for entry in self.entries]
        return encode([self.workers, rows])

    @staticmethod
    def decoded(data: bytes) -> Log:
        workers, rows = decode(data, frozen=True)
        return Log(workers, tuple(LogEntry(*row) for row in rows))


class CommandRecorder:
    """Writes a log. It is optional, as it keeps a copy of every upload."""

    def __init__(self, workers: int) -> None:
        self._workers: Final = workers
        self._entries: list[LogEntry] = []

    def record(self, sequence: int, commands: Sequence[Any], blocks: Sequence[Sequence[Tensor | None]]) -> None:
        """Record one message: its commands, and the blocks of each worker."""
        kept = tuple(tuple(None if block is None else block.numpy().tobytes() for block in row) for row in blocks)
        self._entries.append(LogEntry(sequence, decode(encode(list(commands)), frozen=True), kept))

    def log(self) -> Log:
        return Log(self._workers, tuple(self._entries))


Send = Callable[[Sequence[Any], Sequence[Sequence[bytes | None]]], None]


def replay(log: Log, send: Send) -> None:
    """Send every entry again, to fresh workers; `send` takes the commands and the blocks of each worker."""
    for entry in log.entries:
        send(entry.commands, entry.blocks)
