"""Messages between the controller and the agent of another host; each body is [code, ...] with the fields named here.

First come HELLO, START, READY and GO, then the others in any order; or after HELLO the questions of a check, and DONE.
A block travels once for all workers of a host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import PORTS
from moaic.runtime.protocol.block_checks import check_answer
from moaic.runtime.protocol.limits import Refused
from moaic.text.printable import printable

VERSION: Final = 3
"""Of these messages."""

MOST_CHARACTERS: Final = 400
"""Kept of each text of another host: it is shown to the user."""

MOST_BYTES: Final = 1 << 60
"""Of the memory of a host."""

MOST_CORES: Final = 1 << 20

MOST_GPUS: Final = 1 << 10


class HostCode(IntEnum):
    """What a message is, and its fields."""

    HELLO = 0
    """Agent: what its host is, by name (`HostFacts`)."""
    START = 1
    """Controller: address to listen on, devices, carrier, environment."""
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
    CHECK = 11
    """Controller: the path of a file that it has made, and the address on which the host's workers would listen."""
    CHECKED = 12
    """Agent: what its host has (`HostState`)."""
    MEASURE = 13
    """Controller: address, port and name of another host."""
    MEASURED = 14
    """Agent: how its host reaches that one (`MeasuredLink`)."""
    DONE = 15
    """Controller: the check has ended, and no workers are started."""


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
    triton: str = ""
    """The version of Triton; empty if there is none."""
    gpus: tuple[str, ...] = ()
    """The names of the GPUs that workers can use."""

    def encoded(self) -> list[Any]:
        versions = self.version, self.moaic, self.torch, self.python
        return [*versions, self.cpu, self.cores, self.triton, list(self.gpus)]

    @staticmethod
    def decoded(data: Sequence[Any]) -> HostFacts:
        """Raises Refused."""
        *values, gpus = _typed(data, int, str, str, str, str, int, str, list, what="a greeting")
        _within(len(gpus), range(MOST_GPUS), "number of GPUs")
        version, moaic, torch, python, cpu, cores, triton = values
        names = _typed(gpus, *[str] * len(gpus), what="a list of GPUs")
        facts = HostFacts(version, moaic, torch, python, cpu, cores, triton, tuple(names))
        _within(facts.version, range(1 << 16), "version of messages")
        _within(facts.cores, range(1, MOST_CORES), "number of cores")
        return facts


class FolderState(StrEnum):
    """How a host sees a folder of the program."""

    SHARED = "shared"
    READ_ONLY = "read-only"
    APART = "apart"
    """It has no such folder, or one of its own."""


@dataclass(frozen=True, slots=True)
class HostState:
    """What a check finds on a host."""

    memory: int
    gpu_memory: tuple[int, ...]
    """Bytes of each GPU that workers can use."""
    compiler: str
    """The path of the C++ compiler; empty if there is none."""
    has_header: bool
    """Whether the headers of Python are there."""
    folder: FolderState
    port: int
    """Where it accepts links for the check; 0 if it cannot listen."""
    words: str
    """Why it cannot listen."""

    def encoded(self) -> list[Any]:
        memory = self.memory, list(self.gpu_memory)
        return [*memory, self.compiler, self.has_header, str(self.folder), self.port, self.words]

    @staticmethod
    def decoded(data: Sequence[Any]) -> HostState:
        """Raises Refused."""
        values = _typed(data, int, list, str, bool, str, int, str, what="a state")
        memory, gpu_memory, compiler, has_header, folder, port, words = values
        if folder not in list(FolderState):
            raise Refused(f"a state `{folder}` of a folder")
        _within(len(gpu_memory), range(MOST_GPUS), "number of GPUs")
        for nbytes in (memory, *_typed(gpu_memory, *[int] * len(gpu_memory), what="the memory of GPUs")):
            _within(nbytes, range(MOST_BYTES), "number of bytes")
        _within(port, PORTS, "port")
        if (port == 0) == (words == ""):
            raise Refused("a state that tells neither a port nor why there is none, or both")
        return HostState(memory, tuple(gpu_memory), compiler, has_header, FolderState(folder), port, words)


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """How one host reaches another one."""

    round_trip: float
    """Seconds until a message of one byte is confirmed."""
    rate: float
    """Bytes per second of a large message."""
    error: str
    """Why it is not reached, in words; empty if it is."""

    def encoded(self) -> list[Any]:
        return [self.round_trip, self.rate, self.error]

    @staticmethod
    def decoded(data: Sequence[Any]) -> MeasuredLink:
        """Raises Refused."""
        link = MeasuredLink(*_typed(data, float, float, str, what="a measurement"))
        if not all(math.isfinite(value) and value >= 0 for value in (link.round_trip, link.rate)):
            raise Refused(f"a measurement of {link.round_trip} s and {link.rate} bytes per second")
        return link


def failure(host: str, fields: Sequence[Any]) -> Diagnostic:
    """What a host says in FAILED. Raises Refused."""
    message, hint = _typed(list(fields), str, str, what="a failure")
    return Diagnostic(f"host `{host}`: {message}", hint=hint)


def _typed(data: Sequence[Any], *kinds: type, what: str) -> list[Any]:
    """The values, with texts as the user may see them. Raises Refused unless they have these types."""
    if not isinstance(data, list) or [type(value) for value in data] != list(kinds):
        raise Refused(f"{what} that cannot be read, perhaps of another version of moaic")
    return [printable(value, MOST_CHARACTERS) if isinstance(value, str) else value for value in data]


def _within(value: int, allowed: range, what: str) -> None:
    """Raises Refused for a value that no host has."""
    if value not in allowed:
        raise Refused(f"{value} as a {what}")


def check_from_agent(ranks: range, line: int, body: Any, sizes: Sequence[int]) -> None:
    """Raise Refused unless a message is one of an agent with these ranks; a status line has `line` bytes."""
    try:
        code, *fields = body
        _CHECKS[code](ranks, line, sizes, *fields)
    except (TypeError, ValueError, LookupError) as error:
        raise Refused(f"a message of an agent that cannot be read: {error}") from error


def check_from_controller(ranks: range, body: Any, sizes: Sequence[int]) -> None:
    """Raise Refused unless a message is one of a controller to the agent of these ranks, which run."""
    try:
        match body:
            case [HostCode.RELAY, rows, bytes()]:
                for rank, indices in rows:
                    _own(ranks, rank)
                    if not all(type(index) is int and -1 <= index < len(sizes) for index in indices):
                        raise Refused("a block that is not in the message")
            case [HostCode.KILL, rank]:
                _own(ranks, rank)
            case [HostCode.SEEN]:
                pass
            case _:
                raise Refused("a message that no controller sends to a host whose workers run")
    except (TypeError, ValueError) as error:
        raise Refused(f"a message of a controller that cannot be read: {error}") from error


def _answer(ranks: range, line: int, sizes: Sequence[int], rank: int, body: Any) -> None:
    _own(ranks, rank)
    check_answer(body, sizes)


def _status(ranks: range, line: int, sizes: Sequence[int], lines: bytes, stopped: Sequence[int]) -> None:
    if sizes or type(lines) is not bytes or len(lines) != line * len(ranks):
        raise Refused("status lines of another form")
    for rank in stopped:
        _own(ranks, rank)


def _ended(ranks: range, line: int, sizes: Sequence[int], rank: int, words: str) -> None:
    _own(ranks, rank)
    if sizes or type(words) is not str:
        raise Refused("an end without words")


def _failed(ranks: range, line: int, sizes: Sequence[int], message: str, hint: str) -> None:
    if sizes or type(message) is not str or type(hint) is not str:
        raise Refused("a failure without words")


def _plain(ranks: range, line: int, sizes: Sequence[int], *fields: Any) -> None:
    if sizes:
        raise Refused("blocks where none belong")


def _own(ranks: range, rank: object) -> None:
    if type(rank) is not int or rank not in ranks:
        raise Refused(f"a message in the name of worker {rank}, which belongs to another host")


_CHECKS: Final[Mapping[int, Any]] = {
    HostCode.HELLO: _plain,
    HostCode.READY: _plain,
    HostCode.FAILED: _failed,
    HostCode.CHECKED: _plain,
    HostCode.MEASURED: _plain,
    HostCode.ANSWER: _answer,
    HostCode.STATUS: _status,
    HostCode.ENDED: _ended,
}
