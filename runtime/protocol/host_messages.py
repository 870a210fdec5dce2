"""Messages between the controller and the agent of another host; each body is [code, ...] with the fields named here.

First come HELLO, START, READY and GO, then the others in any order. A block travels once for all workers of a host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from moaic.runtime.protocol.block_checks import check_answer
from moaic.runtime.protocol.limits import Refused

VERSION: Final = 1
"""Of these messages."""


class HostCode(IntEnum):
    """What a message is, and its fields."""

    HELLO = 0
    """Agent: what its host is, by name (`HostFacts`)."""
    START = 1
    """Controller: address to listen on, devices, environment."""
    READY = 2
    """Agent: the port of each worker."""
    GO = 3
    """Controller: encoded `Peers` without what proves the host's name, which the agent has."""
    RELAY = 4
    """Controller: for each worker its rank and the indices of its blocks, -1 for an absent one; a message's body."""
    KILL = 5
    """Controller: the rank of a worker."""
    ANSWER = 6
    """Agent: rank and the body of a worker's message."""
    STATUS = 7
    """Agent: the status lines of its workers, and the ranks of suspended ones."""
    ENDED = 8
    """Agent: rank of a worker that has ended, and how, in words."""
    FAILED = 9
    """Agent: why it cannot start workers, in words."""
    SEEN = 10
    """Controller: it has received a STATUS. One is on its way at a time, as a controller may not read for hours."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What must be alike on the hosts of one job."""

    version: int
    moaic: str
    torch: str
    python: str
    cpu: str
    """Machine and the instruction sets by which results may differ in their last bits."""
    cores: int

    def encoded(self) -> list[Any]:
        return [self.version, self.moaic, self.torch, self.python, self.cpu, self.cores]

    @staticmethod
    def decoded(data: Sequence[Any]) -> HostFacts:
        """Raises Refused."""
        try:
            facts = HostFacts(*data)
        except TypeError as error:
            raise Refused("a greeting of another version of moaic") from error
        if not all(type(value) is kind for value, kind in zip(data, _KINDS, strict=True)):
            raise Refused("a greeting that cannot be read")
        return facts


_KINDS: Final = (int, str, str, str, str, int)


def check_from_agent(ranks: range, line: int, body: Any, sizes: Sequence[int]) -> None:
    """Raise Refused unless a message is one of an agent with these ranks; a status line has `line` bytes."""
    try:
        code, *fields = body
        _CHECKS[code](ranks, line, sizes, *fields)
    except (TypeError, ValueError, LookupError) as error:
        raise Refused(f"a message of an agent that cannot be read: {error}") from error


def _answer(ranks: range, line: int, sizes: Sequence[int], rank: int, body: Any) -> None:
    _own(ranks, rank)
    check_answer(body, sizes)


def _status(ranks: range, line: int, sizes: Sequence[int], lines: bytes, stopped: Sequence[int]) -> None:
    if sizes or len(lines) != line * len(ranks):
        raise Refused(f"status lines of {len(lines)} bytes")
    for rank in stopped:
        _own(ranks, rank)


def _ended(ranks: range, line: int, sizes: Sequence[int], rank: int, words: str) -> None:
    _own(ranks, rank)
    if sizes or type(words) is not str:
        raise Refused("an end without words")


def _plain(ranks: range, line: int, sizes: Sequence[int], *fields: Any) -> None:
    if sizes:
        raise Refused("blocks where none belong")


def _own(ranks: range, rank: object) -> None:
    if type(rank) is not int or rank not in ranks:
        raise Refused(f"a message in the name of worker {rank}, which belongs to another host")


_CHECKS: Final[Mapping[int, Any]] = {
    HostCode.HELLO: _plain,
    HostCode.READY: _plain,
    HostCode.FAILED: _plain,
    HostCode.ANSWER: _answer,
    HostCode.STATUS: _status,
    HostCode.ENDED: _ended,
}
