"""What leads from a controller to its workers: to each one here, to all of another host together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from moaic.runtime.host.status import Status
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import Message

Block = TypeVar("Block")


class Channel(Protocol[Block]):
    """The connection to one or several workers, which the same process is at the other end of."""

    @property
    def ranks(self) -> range: ...

    @property
    def closed(self) -> bool:
        """Whether no more messages come from any of them."""
        ...

    def fileno(self) -> int: ...

    def post(self, bodies: Sequence[bytes | None], rows: Sequence[Sequence[Block | None]]) -> int:
        """Append a message for each of the ranks, or none, to the outbox; returns the bytes of all.

        Equal bodies are one object. Raises Refused for a message over the limits.
        """
        ...

    def push(self) -> bool:
        """Send as much as can be sent now; true once the outbox is empty."""
        ...

    def pull(self) -> None:
        """Receive all that has arrived."""
        ...

    def check(self) -> None:
        """End the connection if the other host has gone without a word."""
        ...

    def next(self) -> tuple[int, Message[Block]] | None:
        """Take the oldest received message, with the rank of its worker, if there is one."""
        ...

    def ended(self) -> Sequence[int]:
        """The ranks that have ended, as far as this process has received."""
        ...

    def close(self) -> None:
        """Close this process's end: this ends the workers, unless a forked child does it."""
        ...


class Workers(Protocol[Block]):
    """All workers of an accelerator, by rank."""

    @property
    def channels(self) -> Sequence[Channel[Block]]:
        """In the order of their ranks."""
        ...

    @property
    def devices(self) -> tuple[str, ...]: ...

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each worker's host; empty for this one."""
        ...

    @property
    def carrier(self) -> Carrier:
        """What carries the data of collectives between them."""
        ...

    @property
    def status(self) -> Status: ...

    def ending(self, rank: int) -> str | None:
        """The end of a worker in words, such as `the process ended with exit code 1`; None while none is known."""
        ...

    def is_stopped(self, rank: int) -> bool:
        """Whether a signal, such as SIGSTOP, has suspended the process."""
        ...

    def kill(self, rank: int) -> None:
        """Kill a worker and its children."""
        ...

    def close(self) -> None:
        """End the workers and wait until they have ended."""
        ...

    def kill_all(self) -> None:
        """End workers that have done nothing yet, without waiting for them to be ready for it."""
        ...
