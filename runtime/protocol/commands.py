"""The commands of the controller and the answers of workers, as they are on the wire.

A message's body is [sequence, commands]. A command is a tuple of named fields; on the wire it is [code, fields].
Workers run commands in order. `line` is a number of `source_lines.SourceLines`, ranks are worker numbers, and a worker
skips commands for other ranks. An answer's body is [request, kind, ...].

Commands are named tuples, not frozen dataclasses: every eager op makes one, in less than half the time, and msgpack
packs a tuple directly. Commands of different classes with equal fields compare equal, so code checks the class of a
command and never compares two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeGuard, cast, get_args


class Put(NamedTuple):
    """Give a buffer the bytes of a block of this message; an absent block means no part for this worker."""

    line: int
    buffer: int
    dtype: str
    shape: Sequence[int]
    """The local shape, of one worker's part."""
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
    """Define the eager op that Operate with this number runs: an encoded `operation.Operation`."""

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
    """Define the resharding that Reshard with this number runs: an encoded `conversion.Resharding`."""

    line: int
    number: int
    resharding: Sequence[Any]


class Reshard(NamedTuple):
    """Reshard values, all of which the same ranks exchange; a target may be the source itself."""

    line: int
    moves: Sequence[tuple[int, int, int]]
    """Number of the resharding, source and target of each."""


class Load(NamedTuple):
    """Parse a program and compile it; ranks not below `ranks` take no part."""

    line: int
    program: int
    text: str
    compiled: bool
    graphs: str
    """The value of a GraphMode."""
    ranks: int
    background: bool = False
    """Whether a process beside the worker compiles it, while it runs op by op until Adopt."""
    mark: str = ""
    """The file to be made when the cache on disk has all functions; empty for none."""


class Run(NamedTuple):
    """Run a program on buffers; None stands for an output that is not wanted."""

    line: int
    program: int
    inputs: Sequence[int]
    outputs: Sequence[int | None]
    key: Sequence[int] | None
    """Two i64 that seed random numbers; None for a program without."""
    sizes: Sequence[int] = ()
    """The numbers of the program's symbols."""
    op_by_op: bool = False
    """Whether the functions run op by op although they are compiled."""


class Adopt(NamedTuple):
    """Use the compiled functions of programs from now on: all of them on all ranks, or none if one is not possible."""

    line: int
    programs: Sequence[int]


class Free(NamedTuple):
    """Release buffers."""

    line: int
    buffers: Sequence[int]


class Forget(NamedTuple):
    """Release all definitions of eager ops."""

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


class ResumeWrites(NamedTuple):
    """Stop withholding writes: the failure of command `root` was raised."""

    line: int
    root: int
    lost: Sequence[int]
    """Buffers whose replicas differ, and which no holder's value can mend."""


class Fetch(NamedTuple):
    """Answer, on some ranks, with a buffer, or with a view of it (geometry: an `operation.ViewGeometry`)."""

    line: int
    buffer: int
    geometry: Sequence[Any] | None
    ranks: Sequence[int]
    request: int = 0


class Synchronize(NamedTuple):
    """Answer after all earlier commands have run."""

    line: int
    request: int = 0


class ReadStatistics(NamedTuple):
    """Answer with the worker's statistics; with `forget_peak` reset its memory peak."""

    line: int
    forget_peak: bool
    request: int = 0


class List(NamedTuple):
    """Answer with [id, dtype, shape, digest] of each buffer."""

    line: int
    request: int = 0


class Store(NamedTuple):
    """Write boxes to files; answer with the offset and length of each in its file."""

    line: int
    paths: Sequence[str]
    """Per worker."""
    boxes: Sequence[Sequence[Any]]
    """Per worker [buffer, local starts, sizes] of each."""
    request: int = 0


class Trace(NamedTuple):
    """Answer with the oldest spans not answered yet, at most `span.ANSWERED_SPANS`; turn tracing on or off."""

    line: int
    on: bool
    request: int = 0


class ListWithheld(NamedTuple):
    """Answer with the withheld writes and the ids of all buffers (`failed_commands.FailedCommands`)."""

    line: int
    request: int = 0


Request = Fetch | Synchronize | ReadStatistics | List | Store | Trace | ListWithheld
"""A command that is answered and changes nothing."""

Command = (
    Put
    | Fill
    | Define
    | Operate
    | DefineResharding
    | Reshard
    | Load
    | Run
    | Adopt
    | Free
    | Forget
    | Restore
    | ResumeWrites
    | Request
)

CODES: Final[Mapping[type[Command], int]] = {kind: code for code, kind in enumerate(get_args(Command))}

_KINDS: Final[Sequence[type[Command]]] = tuple(CODES)

_REQUESTS: Final = frozenset(get_args(Request))


def is_request(command: Command) -> TypeGuard[Request]:
    return type(command) in _REQUESTS


def to_wire(commands: Iterable[Command]) -> list[tuple[int, Command]]:
    """The form in which msgpack packs commands."""
    return [(CODES[type(command)], command) for command in commands]


def from_wire(data: Sequence[Any]) -> Command:
    """The command of its packed form."""
    code, fields = data
    return cast("Callable[..., Command]", _KINDS[code])(*fields)


def kind_of(code: int) -> type[Command] | None:
    """The command class of a code; None for the code of an idle worker."""
    return _KINDS[code] if code >= 0 else None


def subject_of(command: Command) -> int:
    """The number of the operation, resharding or program that a command names; -1 for none."""
    if isinstance(command, Operate):
        return command.number
    if isinstance(command, Reshard):
        return command.moves[0][0]
    return command.program if isinstance(command, (Run, Load)) else -1


def name_of(kind: type[Command]) -> str:
    """The name of a command in messages: `restore`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind.__name__).lower()


class AnswerCode(IntEnum):
    """The kind of an answer, and the fields that follow it."""

    HELLO = 0
    """pid: the worker is ready."""
    VALUE = 1
    """dtype, shape, and a block."""
    DONE = 2
    """plain data, of a form that the request defines."""
    FAILED = 3
    """The worker cannot continue: line, name of the command, the error's class and text, the traceback,
    whether a peer's failure caused it, and for an out-of-memory error the bytes asked for, free and held, else None."""
    RAISED = 4
    """number of the command, then as for FAILED: the command failed, and the worker continues."""
    ADOPTED = 6
    """programs of an Adopt, number of functions, seconds since their Load, runs op by op, what failed, if anything."""
    NOT_CAPTURED = 7
    """why a program is not captured as a CUDA graph where it could be wanted."""
    POISONED = 5
    """number of the failed command that made another answer impossible."""


NO_REQUEST: Final = -1
"""Request number of an answer without a request."""
