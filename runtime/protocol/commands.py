"""What the controller tells workers, and what they answer: the vocabulary of the wire.

A message's body is [sequence, commands]. A command is a tuple of named fields; on the wire it is [code, fields].
Workers run commands in order. `line` is a number that `source_lines.SourceLines` gave, ranks are worker numbers, and a
worker takes no part in what is for other ranks. An answer's body is [request, kind, ...].

Commands are named tuples and not frozen dataclasses: every eager op makes one, in less than half the time, and a tuple
is put on the wire as it is. They are as immutable. Commands of different classes with equal fields compare equal, so
code looks at the class of a command and never compares two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeGuard, cast, get_args


class Put(NamedTuple):
    """Give a buffer the bytes of a block of this message; an absent block means no part for this worker."""

    line: int
    buffer: int
    dtype: str
    shape: Sequence[int]
    """Of the part of one worker."""
    block: int


class Fill(NamedTuple):
    """Give every element of a buffer one value, or any value for None, on some ranks."""

    line: int
    buffer: int
    dtype: str
    shape: Sequence[int]
    ranks: Sequence[int]
    value: float | bool | None


class Define(NamedTuple):
    """Say what Operate with this number does: an encoded `operation.Operation`."""

    line: int
    number: int
    operation: Sequence[Any]


class Operate(NamedTuple):
    """Run a defined eager op; its results become the buffers `outputs`."""

    line: int
    number: int
    operands: Sequence[int]
    scalars: Sequence[Any]
    outputs: Sequence[int]


class DefineResharding(NamedTuple):
    """Say what Reshard with this number does: an encoded `conversion.Resharding`."""

    line: int
    number: int
    resharding: Sequence[Any]


class Reshard(NamedTuple):
    """Bring a value to another placement; `target` may be the source itself."""

    line: int
    number: int
    source: int
    target: int


class Load(NamedTuple):
    """Parse a program and begin to compile it; ranks not below `ranks` take no part."""

    line: int
    program: int
    text: str
    compiled: bool
    recorded: bool
    ranks: int


class Run(NamedTuple):
    """Run a program on buffers; None stands for an output that is not wanted."""

    line: int
    program: int
    inputs: Sequence[int]
    outputs: Sequence[int | None]
    key: Sequence[int] | None
    """Two i64 from which random numbers are drawn, for a program that draws."""


class Free(NamedTuple):
    """Let buffers go."""

    line: int
    buffers: Sequence[int]


class Forget(NamedTuple):
    """Let all definitions of eager ops go."""

    line: int


class Restore(NamedTuple):
    """Read each worker's boxes of a buffer from files (`checkpoint_io.read`)."""

    line: int
    buffer: int
    dtype: str
    shape: Sequence[int]
    held: Sequence[Any]
    """Per worker its boxes, or None."""
    sources: Sequence[Any]


class Told(NamedTuple):
    """The user has been told of a failed command; workers hold different values of the buffers `apart`."""

    line: int
    root: int
    apart: Sequence[int]


class Fetch(NamedTuple):
    """Answer, on some ranks, with a buffer, or with what a geometry (`operation.ViewGeometry`) shows of it."""

    line: int
    buffer: int
    geometry: Sequence[Any] | None
    ranks: Sequence[int]
    request: int = 0


class Synchronize(NamedTuple):
    """Answer once all before is done."""

    line: int
    request: int = 0


class Report(NamedTuple):
    """Answer with the worker's statistics; the peak of memory counts anew if it is to be forgotten."""

    line: int
    forget_peak: bool
    request: int = 0


class List(NamedTuple):
    """Answer with [id, dtype, shape, digest] of each buffer."""

    line: int
    request: int = 0


class Store(NamedTuple):
    """Write boxes to files; answer with where in the file each is."""

    line: int
    paths: Sequence[str]
    """Per worker."""
    boxes: Sequence[Sequence[Any]]
    """Per worker [buffer, local starts, sizes] of each."""
    request: int = 0


class Trace(NamedTuple):
    """Answer with the spans noted since the last one (`span.TraceSpan`); from now on note them, or not."""

    line: int
    on: bool
    request: int = 0


class Settle(NamedTuple):
    """Answer with the writes that the worker withholds and the ids that it has (`trouble.Trouble`)."""

    line: int
    request: int = 0


Request = Fetch | Synchronize | Report | List | Store | Trace | Settle
"""A command that is answered and changes nothing."""

Command = (
    Put | Fill | Define | Operate | DefineResharding | Reshard | Load | Run | Free | Forget | Restore | Told | Request
)

CODES: Final[Mapping[type[Command], int]] = {kind: code for code, kind in enumerate(get_args(Command))}

_KINDS: Final[Sequence[type[Command]]] = tuple(CODES)

_MAKERS: Final = cast("Sequence[Any]", _KINDS)

_REQUESTS: Final = frozenset(get_args(Request))


def is_request(command: Command) -> TypeGuard[Request]:
    return type(command) in _REQUESTS


def to_wire(commands: Iterable[Command]) -> list[tuple[int, Command]]:
    """The form in which msgpack packs commands."""
    return [(CODES[type(command)], command) for command in commands]


def from_wire(data: Sequence[Any]) -> Command:
    """The command that was packed."""
    code, fields = data
    return _MAKERS[code](*fields)


def kind_of(code: int) -> type[Command] | None:
    """The class of a command's code; None for the code of a worker that is at none."""
    return _KINDS[code] if code >= 0 else None


def name_of(kind: type[Command]) -> str:
    """`restore`: what a command is called in messages."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


class AnswerCode(IntEnum):
    """What an answer is."""

    HELLO = 0
    """pid: the worker is ready."""
    VALUE = 1
    """dtype, shape, and a block."""
    DONE = 2
    """whatever the request asks for."""
    FAILED = 3
    """The worker is of no more use: line, what was done, the error's kind and text, the worker's traceback, whether a
    peer's failure caused it, and where memory was short the bytes asked for, free and held, else None."""
    RAISED = 4
    """number of the command, then as for FAILED: the command failed, and the worker goes on."""
    SPOILT = 5
    """number of the failed command for which there is no other answer."""


NO_REQUEST: Final = -1
"""Request number of an answer that nothing asked for."""
