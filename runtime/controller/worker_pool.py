"""The pool of workers: sends queued commands, receives answers, and finds the cause of failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch import Tensor

from moaic.interrupts import uninterrupted
from moaic.runtime.controller.command_log import CommandRecorder
from moaic.runtime.controller.errors import OP_ERRORS, OutOfMemory, WorkerError
from moaic.runtime.controller.heartbeats import BEAT_SECONDS, Heartbeats
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.status import IDLE
from moaic.runtime.launch.channel import Channel, Workers
from moaic.runtime.protocol.commands import (
    AnswerCode,
    Command,
    ListWithheld,
    Put,
    Request,
    ResumeWrites,
    Synchronize,
    to_wire,
)
from moaic.runtime.protocol.frames import Arrivals, Message, encode, push_all, readable
from moaic.runtime.protocol.shortage import Shortage
from moaic.runtime.protocol.wire import from_block
from moaic.runtime.protocol.withheld_writes import furthest_replicas, unpacked

LONG_QUEUE: Final = 500
"""Number of queued commands at which the queue is sent without a request."""

LARGE_QUEUE: Final = 32 << 20
"""Bytes of queued blocks at which the queue is sent without a request."""

GRACE_SECONDS: Final = 1.0
"""Time after a first failure in which the other workers report, so that the cause is raised, not a consequence."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of one worker. Of several, the one with the smallest `kind` is the cause."""

    worker: int
    line: int
    command: str
    error: str
    details: str
    kind: int
    exception: str = ""
    """Name of the exception's class; empty if the worker ended without one."""
    shortage: Shortage | None = None


CAUSE, ENDED, CONSEQUENCE = range(3)


@dataclass(frozen=True, slots=True)
class PoisonedAnswer:
    """Stands for an answer that a failed command made impossible; `root` is the number of that command."""

    root: int


class WorkerPool:
    """The workers, seen from the controller. Not thread-safe: the owner serializes calls."""

    def __init__(self, workers: Workers[Tensor], lines: SourceLines, names: Callable[[int, int, int], str]) -> None:
        """`names(code, subject, step)` returns the name of the command in progress on a worker that has ended."""
        self._workers = workers
        self._lines = lines
        self._names = names
        self._channels = workers.channels
        self._arrivals = Arrivals(self._channels)
        self.devices = workers.devices
        """The device of each worker."""
        self.hosts = workers.hosts
        """The name of each worker's host; empty for this one."""
        self._queue: list[Command] = []
        self._blocks: list[Sequence[Tensor | None]] = []
        self._queued_bytes = 0
        self._sequence = 0
        self._requests = 0
        self._answers: dict[int, Any] = {}
        self._awaited: set[int] = set()
        """The ranks whose answer to the current request has not come."""
        self._heartbeats = Heartbeats(workers)
        self._failure: WorkerError | None = None
        self._raised: dict[int, Failure] = {}
        self._unraised: Failure | None = None
        self._recorder: CommandRecorder | None = None
        self.waiting: Callable[[Sequence[int]], None] = _say_nothing
        """Called every second of a wait with the code of each worker's current command, and at its end with []."""
        self.mended: Callable[[Mapping[int, int]], Mapping[int, Command]] = _not_mended
        """Called with the rank of each buffer's latest value; returns commands that copy it to the other replicas."""
        self.adopted: Callable[[str, Sequence[int], int, float, int, str], None] = _ignore
        """Called with the worker's host, empty for this one, and the data of an ADOPTED answer."""
        self.not_captured: Callable[[str], None] = _ignore
        """Called with the reason of a NOT_CAPTURED answer."""
        self.advice: Callable[[Shortage], str] | None = None
        """Returns the remedies for the message of an out-of-memory error."""
        self.greeted: dict[int, int] = {}
        """The pid of each worker that has sent HELLO, by rank."""
        self.welcome: Callable[[int, int], None] | None = None
        """Called with the rank and pid of each worker that sends HELLO."""
        self.closed = False
        self.messages = 0
        self.commands = 0
        self.bytes = 0

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have sent HELLO."""
        return len(self.greeted) == self.size

    def has_compiled(self, number: int) -> bool:
        """Whether compilation in the background has ended on all workers for the first `number` programs with it."""
        return all(self._workers.status.compiled(rank) >= number for rank in range(self.size))

    @property
    def status_descriptor(self) -> int:
        """The descriptor of the shared memory that begins with the workers' status lines."""
        return self._workers.status.descriptor

    def record(self, recorder: CommandRecorder) -> None:
        """Record every command from now on."""
        self._recorder = recorder

    def check(self) -> None:
        """Raise WorkerError if a failure of a worker has been received."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        if self.closed:
            raise WorkerError("the accelerator has been closed")

    def push(self, command: Command) -> int:
        """Queue a command; return its number."""
        number = self._sequence + len(self._queue)
        self._queue.append(command)
        if len(self._queue) >= LONG_QUEUE:
            self.flush()
        return number

    def put(self, command: Put, parts: Sequence[Tensor | None]) -> None:
        """Queue a command with a block for each worker."""
        self._queue.append(command._replace(block=len(self._blocks)))
        self._blocks.append(parts)
        self._queued_bytes += sum(part.numel() for part in parts if part is not None)
        if self._queued_bytes >= LARGE_QUEUE:
            self.flush()

    def flush(self) -> None:
        """Send the queue, one message per worker, without waiting for its execution."""
        self.check()
        if self._queue:
            self._send_queue([], ())

    def ask(self, request: Request, ranks: Sequence[int]) -> dict[int, Any]:
        """Send the queue and, to `ranks`, a request; wait for their answers.

        An answer is plain data, or a tensor if the request is for one. Raises WorkerError for a lost worker. If a
        failed command made an answer impossible, raises the exception of that command; execution then continues.
        """
        answers = self._asked(request, ranks)
        roots = [answer.root for answer in answers.values() if isinstance(answer, PoisonedAnswer)]
        if roots:
            self._raise_failed(min(roots))
        return answers

    def _asked(self, request: Request, ranks: Sequence[int]) -> dict[int, Any]:
        self.check()
        self._requests += 1
        self._answers, self._awaited = {}, set(ranks)
        self._send_queue(to_wire([request._replace(request=self._requests)]), frozenset(ranks))
        self._await()
        return self._answers

    def _raise_failed(self, root: int) -> NoReturn:
        """Raise the exception of a failed command, after telling the workers to accept writes again."""
        furthest = furthest_replicas(self._withheld())
        mended = self.mended({buffer_id: rank for buffer_id, rank in furthest.items() if rank is not None})
        self.push(ResumeWrites(-1, root, [buffer_id for buffer_id in furthest if buffer_id not in mended]))
        for command in mended.values():
            self.push(command)
        self._unraised = None
        raise self._op_error(self._raised[root])

    def _withheld(self) -> dict[int, Any]:
        """What each worker withholds, holds, and has poisoned."""
        answers = self._asked(ListWithheld(-1), range(self.size))
        return {rank: unpacked(answer) for rank, answer in answers.items()}

    def shortage_in(self, number: int) -> Shortage | None:
        """The shortage by which command `number` failed, after waiting for all commands; None if it did not."""
        # Workers report a failure before they answer; the answers may stand for failures of other commands.
        self._asked(Synchronize(-1), range(self.size))
        failure = self._raised.get(number)
        return None if failure is None else failure.shortage

    def forgive(self, number: int) -> bool:
        """Whether failed command `number` has cost nothing but its own new results, and is no longer to be raised.

        Not after the failure of an earlier command, nor once a write has been withheld, which would be lost.
        """
        failure = self._raised.get(number)
        if failure is None or failure is not self._unraised:
            return False
        if any(withheld for withheld, _, _ in self._withheld().values()):
            return False
        self.push(ResumeWrites(-1, number, []))
        self._unraised = None
        return True

    @property
    def unraised(self) -> str:
        """The message of the first failure that has not been raised; empty if there is none."""
        return "" if self._unraised is None else str(self._op_error(self._unraised))

    def _await(self) -> None:
        waited = False
        beat = time.monotonic() + BEAT_SECONDS
        try:
            while self._awaited:
                arrived = self._arrivals.wait(max(0.0, beat - time.monotonic()))
                # In silence all: a poll does not see what an interrupted call has decrypted.
                self._receive_from(arrived or self._channels)
                # Not only in silence: other hosts send the state of their workers all the time.
                if time.monotonic() >= beat and self._awaited:
                    beat = time.monotonic() + BEAT_SECONDS
                    for channel in self._channels:
                        channel.push()
                    self._check_heartbeats()
                    waited = True
                    self.waiting([self._code(rank) for rank in range(self.size)])
        finally:
            if waited:
                self.waiting([])

    def _code(self, rank: int) -> int:
        """The code of a worker's current command; IDLE before it is ready."""
        return self._workers.status.activity(rank).code if rank in self.greeted else IDLE.code

    def send(self, commands: Sequence[Any], rows: Sequence[Sequence[Tensor | None]]) -> None:
        """Send one message to each worker at once: the same commands, its own row of blocks."""
        self._post(commands, [], (), rows)
        self._deliver()

    def wait_for_greeting(self, seconds: float) -> None:
        """Wait at most `seconds` for a message of a worker. The only method that needs no lock."""
        self._arrivals.wait(seconds)

    def receive(self) -> None:
        """Receive the messages that have arrived. Raises WorkerError."""
        self.check()
        self._receive_from(self._arrivals.wait(0.0))

    def close(self) -> None:
        """End the workers and drop the queue."""
        if not self.closed:
            self.closed = True
            self._queue.clear()
            # Workers that still import libraries would not see that their sockets are closed.
            if self.is_complete:
                self._workers.close()
            else:
                self._workers.kill_all()

    def abandon(self) -> None:
        """Release the workers without ending them: in a forked child they belong to the parent."""
        self.closed = True
        for channel in self._channels:
            channel.close()

    def _send_queue(self, request: Sequence[Any], ranks: Collection[int]) -> None:
        with uninterrupted():
            commands, blocks = to_wire(self._queue), self._blocks
            self._queue, self._blocks, self._queued_bytes = [], [], 0
            rows = [[block[rank] for block in blocks] for rank in range(self.size)]
            if self._recorder is not None and commands:
                self._recorder.record(self._sequence, commands, rows)
            self._post(commands, request, ranks, rows)
        self._deliver()

    def _post(
        self,
        commands: Sequence[Any],
        request: Sequence[Any],
        ranks: Collection[int],
        rows: Sequence[Sequence[Tensor | None]],
    ) -> None:
        """Put one message into each worker's outbox: the commands and, for `ranks`, the request if there is one."""
        body = encode([self._sequence, commands]) if commands else None
        with_request = encode([self._sequence, [*commands, *request]]) if request else body
        self._sequence += len(commands)
        self.commands += len(commands)
        self.messages += 1
        for channel in self._channels:
            bodies = [with_request if rank in ranks else body for rank in channel.ranks]
            self.bytes += channel.post(bodies, [rows[rank] for rank in channel.ranks])

    def _deliver(self) -> None:
        push_all(self._channels)
        for channel in self._arrivals.wait(0.0):
            channel.pull()
        # All channels, from which `push_all` may have received.
        self._take_from(self._channels)

    def _receive_from(self, arrived: Sequence[Channel[Tensor]]) -> None:
        """Receive what has arrived; raise for a failed or ended worker."""
        for channel in arrived:
            channel.pull()
        self._take_from(arrived)

    def _take_from(self, channels: Sequence[Channel[Tensor]]) -> None:
        """Take the messages that have been received; raise for a failed or ended worker."""
        for channel in channels:
            while (received := channel.next()) is not None:
                self._receive(*received)
            for rank in channel.ended():
                self._fail(rank, self._ended(rank))

    def _check_heartbeats(self) -> None:
        """Raise for a worker whose process lives but whose heartbeats have stopped."""
        for rank, missed in self._heartbeats.missed():
            failure = self._ended(rank, f"it has sent no heartbeat for {missed} seconds")
            self._workers.kill(rank)
            self._fail(rank, failure)

    def _receive(self, rank: int, message: Message[Tensor]) -> None:
        request, kind, *data = message.body
        if kind == AnswerCode.FAILED:
            self._fail(rank, self._failed(rank, data))
        elif kind == AnswerCode.RAISED:
            failure = self._raised.setdefault(data[0], self._failed(rank, data[1:]))
            self._unraised = self._unraised or failure
        elif kind == AnswerCode.ADOPTED:
            self.adopted(self.hosts[rank], *data)
        elif kind == AnswerCode.NOT_CAPTURED:
            self.not_captured(*data)
        elif kind == AnswerCode.HELLO:
            (self.greeted[rank],) = data
            if self.welcome is not None:
                self.welcome(rank, self.greeted[rank])
        elif request == self._requests:
            self._answers[rank] = _value(kind, message)
            self._awaited.discard(rank)

    def _fail(self, rank: int, first: Failure) -> NoReturn:
        """Find the cause of a first failure, end all workers, and raise the cause."""
        failures = [first] if first.kind == CAUSE else [first, *self._others_failures(rank)]
        cause = min(failures, key=lambda failure: failure.kind)
        self.close()
        self._failure = self._error(cause)
        raise self._failure

    def _error(self, failure: Failure) -> WorkerError:
        shortage = failure.shortage
        return WorkerError(self._text(failure)) if shortage is None else self._out_of_memory(failure, shortage)

    def _op_error(self, failure: Failure) -> Exception:
        """The exception that PyTorch raises for the same mistake; a WorkerError for any other failure."""
        error = OP_ERRORS.get(failure.exception)
        if error is None or failure.shortage is not None:
            return self._error(failure)
        line = self._lines.line(failure.line)
        return error(f"{failure.error}\n" + ("in " if line is None else f"at {line}, in ") + failure.command)

    def _others_failures(self, known: int) -> list[Failure]:
        """The failures that other workers report, or their ends, within GRACE_SECONDS."""
        failures: list[Failure] = []
        # Those of closed channels, too: what they said before may have been received while others were sent to.
        silent = set(range(self.size)) - {known}
        until = time.monotonic() + GRACE_SECONDS
        while silent and time.monotonic() < until and not any(failure.kind == CAUSE for failure in failures):
            for channel in self._channels:
                failures += self._drained(channel, silent)
            if silent:
                readable([channel for channel in self._channels if silent.intersection(channel.ranks)], 0.05)
        return failures

    def _drained(self, channel: Channel[Tensor], silent: set[int]) -> list[Failure]:
        """The failures that silent workers of a channel report, or their ends; they will report no more."""
        channel.pull()
        failures: list[Failure] = []
        while (received := channel.next()) is not None:
            rank, message = received
            if rank in silent and message.body[1] == AnswerCode.FAILED:
                failures.append(self._failed(rank, message.body[2:]))
                silent.discard(rank)
        for rank in silent.intersection(channel.ended()):
            failures.append(self._ended(rank))
            silent.discard(rank)
        return failures

    def _failed(self, rank: int, data: Sequence[Any]) -> Failure:
        line, command, exception, error, details, is_consequence, missing = data
        shortage = None if missing is None else Shortage(*missing)
        kind = CONSEQUENCE if is_consequence else CAUSE
        return Failure(rank, line, command, error, details, kind, exception, shortage)

    def _ended(self, rank: int, how: str = "") -> Failure:
        activity = self._workers.status.activity(rank)
        command = self._names(activity.code, activity.subject, activity.step)
        if self.hosts[rank] and any(rank in each.ranks and each.closed for each in self._channels):
            # What is known of its status is old.
            command = "an unknown command"
        return Failure(rank, activity.line, command, how or self._ending(rank), "", ENDED)

    def _ending(self, rank: int) -> str:
        """The end of a worker whose channel says so, in words; its process's end may be reported a moment later."""
        until = time.monotonic() + GRACE_SECONDS
        while (ending := self._workers.ending(rank)) is None and time.monotonic() < until:
            time.sleep(0.005)
        return "it closed its connection" if ending is None else ending

    def _text(self, failure: Failure) -> str:
        line = self._lines.line(failure.line)
        place = f", asked for at {line}" if line is not None else ""
        error = f"{failure.exception}: {failure.error}" if failure.exception else failure.error
        head = f"{self._name(failure.worker)} failed in {failure.command}{place}: {error}"
        return f"{head}\n\nOn the worker:\n{failure.details}" if failure.details else head

    def _name(self, rank: int) -> str:
        host = self.hosts[rank]
        return f"worker {rank} of {self.size} ({host})" if host else f"worker {rank} of {self.size}"

    def _out_of_memory(self, failure: Failure, shortage: Shortage) -> OutOfMemory:
        line = self._lines.line(failure.line)
        place = f", asked for at {line}" if line is not None else ""
        head = f"{self._name(failure.worker)} ran out of memory in {failure.command}{place}: {shortage}"
        return OutOfMemory(head if self.advice is None else f"{head}\n{self.advice(shortage)}")


def _ignore(*data: object) -> None:
    pass


def _not_mended(latest: Mapping[int, int]) -> Mapping[int, Command]:
    return {}


def _say_nothing(codes: Sequence[int]) -> None:
    pass


def _value(kind: int, message: Message[Tensor]) -> Any:
    if kind == AnswerCode.POISONED:
        return PoisonedAnswer(message.body[2])
    if kind != AnswerCode.VALUE:
        return message.body[2]
    dtype, shape = message.body[2]
    (block,) = message.blocks
    assert block is not None
    return from_block(block, DTYPES[dtype], shape)
