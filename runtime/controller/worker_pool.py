"""All workers together: commands to them, one message each per flush, their answers, and what becomes of failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch import Tensor

from moaic.runtime.controller.command_log import CommandRecorder
from moaic.runtime.controller.errors import OF_OPS, OutOfMemory, WorkerError
from moaic.runtime.controller.launch import LocalWorker, LocalWorkers
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.status import IDLE
from moaic.runtime.protocol.commands import AnswerCode, Command, Put, Request, Settle, Told, to_wire
from moaic.runtime.protocol.shortage import Shortage
from moaic.runtime.protocol.wire import (
    Connection,
    Message,
    encode,
    frame,
    from_block,
    push_all,
    readable,
    uninterrupted,
)
from moaic.runtime.protocol.withheld_writes import lying_apart

LONG_QUEUE: Final = 500
"""Commands after which a queue is sent although nobody waits."""

LARGE_QUEUE: Final = 32 << 20
"""Bytes of blocks after which a queue is sent although nobody waits."""

BEAT_SECONDS: Final = 1.0
"""How often a waiting controller asks itself whether the workers are alive."""

MISSED_BEATS: Final = 15
"""A worker's thread for signs of life beats every second, and no computation delays it for long: a worker that misses
this many of them, counted by a clock that stops when we are stopped, is stuck."""

STOPPED_BEATS: Final = 2
"""The same for a process that somebody has stopped by a signal, which is no matter of load."""

GRACE_SECONDS: Final = 1.0
"""After a first failure the others have this long to say what they know: the cause is to be told, not a consequence."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What one worker's failure looks like from here; smaller kinds explain larger ones."""

    worker: int
    line: int
    what: str
    error: str
    details: str
    kind: int
    exception: str = ""
    """Name of the exception's class, where there was one."""
    shortage: Shortage | None = None


CAUSE, ENDED, CONSEQUENCE = range(3)


@dataclass(frozen=True, slots=True)
class SpoiltAnswer:
    """In place of an answer: the number of the failed command for which there is none."""

    root: int


class WorkerPool:
    """The workers, seen from the controller. Not thread-safe: whoever owns it serializes the calls."""

    def __init__(self, workers: LocalWorkers, lines: SourceLines, names: Callable[[int, int, int], str]) -> None:
        """`names(code, subject, step)` names what a worker was doing, for one that cannot tell any more."""
        self._workers = workers
        self._lines = lines
        self._names = names
        self._connections = [worker.connection for worker in workers.workers]
        self._queue: list[Command] = []
        self._blocks: list[Sequence[Tensor | None]] = []
        self._queued_bytes = 0
        self._sequence = 0
        self._requests = 0
        self._answers: dict[int, Any] = {}
        self._heard = [(0, 0)] * self.size
        self._failure: WorkerError | None = None
        self._raised: dict[int, Failure] = {}
        self._untold: Failure | None = None
        self._recorder: CommandRecorder | None = None
        self.waiting: Callable[[Sequence[int]], None] = _say_nothing
        """Told, now and then while an answer is awaited, which kind of command each worker is at; none in the end."""
        self.ways_out: Callable[[Shortage], str] | None = None
        """Says what a person can do about too little memory."""
        self.greeted: dict[int, int] = {}
        """Process of each worker that has said hello."""
        self.welcome: Callable[[int, int], None] | None = None
        """Told rank and process of each worker that says hello."""
        self.closed = False
        self.messages = 0
        self.commands = 0

    @property
    def size(self) -> int:
        return len(self._workers.workers)

    @property
    def is_complete(self) -> bool:
        """Whether all workers have said hello."""
        return len(self.greeted) == self.size

    @property
    def status_descriptor(self) -> int:
        """Of the memory that begins with the workers' status lines."""
        return self._workers.status.descriptor

    def record(self, recorder: CommandRecorder) -> None:
        """Has every command from now on written down."""
        self._recorder = recorder

    def check(self) -> None:
        """Raises WorkerError if a worker has failed, as far as is known without asking."""
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        if self.closed:
            raise WorkerError("the accelerator has been closed")

    def push(self, command: Command) -> None:
        """Queues a command."""
        self._queue.append(command)
        if len(self._queue) >= LONG_QUEUE:
            self.flush()

    def put(self, command: Put, parts: Sequence[Tensor | None]) -> None:
        """Queues a command with a block for each worker."""
        self._queue.append(command._replace(block=len(self._blocks)))
        self._blocks.append(parts)
        self._queued_bytes += sum(part.numel() for part in parts if part is not None)
        if self._queued_bytes >= LARGE_QUEUE:
            self.flush()

    def flush(self) -> None:
        """Sends what is queued, one message per worker, without waiting for anything to be done."""
        self.check()
        if self._queue:
            self._send_queue([], ())

    def ask(self, request: Request, ranks: Sequence[int]) -> dict[int, Any]:
        """Sends all that is queued and, to `ranks`, a request; waits for their answers.

        An answer is plain data, or a tensor for a request of one. Raises WorkerError for a worker that is lost, and
        what a command raised for which there is no answer: from then on all goes on.
        """
        answers = self._asked(request, ranks)
        roots = [answer.root for answer in answers.values() if isinstance(answer, SpoiltAnswer)]
        if roots:
            self._tell(min(roots))
        return answers

    def _asked(self, request: Request, ranks: Sequence[int]) -> dict[int, Any]:
        self.check()
        self._requests += 1
        self._answers = {}
        self._send_queue(to_wire([request._replace(request=self._requests)]), ranks)
        self._await(ranks)
        return self._answers

    def _tell(self, root: int) -> NoReturn:
        """Has the workers write again what they withhold, and raises what went wrong in a command."""
        reports = self._asked(Settle(-1), range(self.size))
        self.push(Told(-1, root, lying_apart(list(reports.values()))))
        self._untold = None
        raise self._told(self._raised[root])

    @property
    def untold(self) -> str:
        """What went wrong and has not been raised; empty for nothing."""
        return "" if self._untold is None else str(self._told(self._untold))

    def _await(self, ranks: Sequence[int]) -> None:
        waited = False
        try:
            while not all(rank in self._answers for rank in ranks):
                if not readable(self._connections, BEAT_SECONDS):
                    self._listen()
                    waited = True
                    self.waiting([self._code(rank) for rank in range(self.size)])
                self._look()
        finally:
            if waited:
                self.waiting([])

    def _code(self, rank: int) -> int:
        """The kind of command that a worker is at; that of none before it is ready."""
        return self._workers.activity(rank).code if rank in self.greeted else IDLE.code

    def send(self, commands: Sequence[Any], rows: Sequence[Sequence[Tensor | None]]) -> None:
        """Sends one message to each worker at once: the same commands, its own row of blocks."""
        self._post(commands, [], (), rows)
        self._deliver()

    def wait_for_greeting(self, seconds: float) -> None:
        """Waits until a worker may have said hello, or that long. The one call that needs no serializing."""
        readable([connection for rank, connection in enumerate(self._connections) if rank not in self.greeted], seconds)

    def receive(self) -> None:
        """Receives what is there. Raises WorkerError."""
        self.check()
        self._look()

    def close(self) -> None:
        """Ends the workers. What was queued is lost."""
        if not self.closed:
            self.closed = True
            self._queue.clear()
            self._workers.close()

    def abandon(self) -> None:
        """Lets go of the workers without ending them: for a forked child, to which they do not belong."""
        self.closed = True
        self._workers.close_sockets()

    def _send_queue(self, request: Sequence[Any], ranks: Sequence[int]) -> None:
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
        ranks: Sequence[int],
        rows: Sequence[Sequence[Tensor | None]],
    ) -> None:
        """Puts one message into each worker's outbox: the commands, and for `ranks` a request, if there is one."""
        body = encode([self._sequence, commands]) if commands else None
        asking = encode([self._sequence, [*commands, *request]]) if request else body
        self._sequence += len(commands)
        self.commands += len(commands)
        self.messages += 1
        for rank, (connection, row) in enumerate(zip(self._connections, rows, strict=True)):
            mine = asking if rank in ranks else body
            if mine is not None:
                connection.post(frame(mine, row))

    def _deliver(self) -> None:
        push_all(self._connections)
        self._look()

    def _look(self) -> None:
        """Receives what is there; a failure or an end that shows is raised."""
        for rank, connection in enumerate(self._connections):
            connection.pull()
            while (message := connection.next()) is not None:
                self._receive(rank, message)
            if connection.closed:
                self._fail(rank, self._ended(rank))

    def _listen(self) -> None:
        """Raises for a worker that lives and yet has stopped giving signs of life."""
        for rank in range(self.size):
            beats = self._workers.beats(rank)
            known, missed = self._heard[rank]
            self._heard[rank] = (beats, missed + 1) if beats == known and beats else (beats, 0)
            worker = self._workers.workers[rank]
            if missed >= (STOPPED_BEATS if worker.is_stopped() else MISSED_BEATS):
                failure = self._ended(rank, f"it has given no sign of life for {missed + 1} seconds")
                worker.kill()
                self._fail(rank, failure)

    def _receive(self, rank: int, message: Message) -> None:
        request, kind, *data = message.body
        if kind == AnswerCode.FAILED:
            self._fail(rank, self._failed(rank, data))
        elif kind == AnswerCode.RAISED:
            failure = self._raised.setdefault(data[0], self._failed(rank, data[1:]))
            self._untold = self._untold or failure
        elif kind == AnswerCode.HELLO:
            (self.greeted[rank],) = data
            if self.welcome is not None:
                self.welcome(rank, self.greeted[rank])
        elif request == self._requests:
            self._answers[rank] = _value(kind, message)

    def _fail(self, rank: int, first: Failure) -> NoReturn:
        """Finds the cause of a first failure, ends all workers, and raises what happened."""
        failures = [first] if first.kind == CAUSE else [first, *self._others_failures(rank)]
        cause = min(failures, key=lambda failure: failure.kind)
        self.close()
        self._failure = self._error(cause)
        raise self._failure

    def _error(self, failure: Failure) -> WorkerError:
        short = failure.shortage
        return WorkerError(self._text(failure)) if short is None else self._out_of_memory(failure, short)

    def _told(self, failure: Failure) -> Exception:
        """What an op raised, as PyTorch would raise it; anything else tells of the worker."""
        kind = OF_OPS.get(failure.exception)
        if kind is None or failure.shortage is not None:
            return self._error(failure)
        line = self._lines.line(failure.line)
        return kind(f"{failure.error}\n" + ("in " if line is None else f"at {line}, in ") + failure.what)

    def _others_failures(self, known: int) -> list[Failure]:
        """What the other workers report or how they end, within the time of grace."""
        found: list[Failure] = []
        open_: dict[int, Connection] = {r: c for r, c in enumerate(self._connections) if r != known and not c.closed}
        until = time.monotonic() + GRACE_SECONDS
        while open_ and time.monotonic() < until and not any(failure.kind == CAUSE for failure in found):
            for rank, connection in list(open_.items()):
                connection.pull()
                if self._drain(rank, connection, found):
                    del open_[rank]
            if open_:
                readable(list(open_.values()), 0.05)
        return found

    def _drain(self, rank: int, connection: Connection, found: list[Failure]) -> bool:
        """Adds what `rank` says of its failure; true once nothing more is to be expected from it."""
        while (message := connection.next()) is not None:
            if message.body[1] == AnswerCode.FAILED:
                found.append(self._failed(rank, message.body[2:]))
                return True
        if connection.closed:
            found.append(self._ended(rank))
        return connection.closed

    def _failed(self, rank: int, data: Sequence[Any]) -> Failure:
        line, what, exception, error, details, is_consequence, missing = data
        short = None if missing is None else Shortage(*missing)
        kind = CONSEQUENCE if is_consequence else CAUSE
        return Failure(rank, line, what, error, details, kind, exception, short)

    def _ended(self, rank: int, how: str = "") -> Failure:
        worker = self._workers.workers[rank]
        activity = self._workers.activity(rank)
        what = self._names(activity.code, activity.subject, activity.step)
        return Failure(rank, activity.line, what, how or _ending(worker), "", ENDED)

    def _text(self, failure: Failure) -> str:
        line = self._lines.line(failure.line)
        place = f", asked for at {line}" if line is not None else ""
        error = f"{failure.exception}: {failure.error}" if failure.exception else failure.error
        head = f"worker {failure.worker} of {self.size} failed in {failure.what}{place}: {error}"
        return f"{head}\n\nOn the worker:\n{failure.details}" if failure.details else head

    def _out_of_memory(self, failure: Failure, shortage: Shortage) -> OutOfMemory:
        line = self._lines.line(failure.line)
        place = f", asked for at {line}" if line is not None else ""
        head = f"worker {failure.worker} of {self.size} ran out of memory in {failure.what}{place}: {shortage}"
        return OutOfMemory(head if self.ways_out is None else f"{head}\n{self.ways_out(shortage)}")


def _say_nothing(codes: Sequence[int]) -> None:
    pass


def _ending(worker: LocalWorker) -> str:
    """How a worker whose socket has ended did end, which may take a moment to be known."""
    until = time.monotonic() + GRACE_SECONDS
    while (ending := worker.ending()) is None and time.monotonic() < until:
        time.sleep(0.005)
    return f"the process {ending}" if ending is not None else "it closed its connection"


def _value(kind: int, message: Message) -> Any:
    if kind == AnswerCode.SPOILT:
        return SpoiltAnswer(message.body[2])
    if kind != AnswerCode.VALUE:
        return message.body[2]
    dtype, shape = message.body[2]
    (block,) = message.blocks
    assert block is not None
    return from_block(block, DTYPES[dtype], shape)
