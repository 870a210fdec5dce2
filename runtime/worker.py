"""A worker: one process per physical device, which does what the controller's messages say until their socket ends."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime import files
from moaic.runtime.commands import NO_REQUEST, REQUESTS, Answer, Code
from moaic.runtime.execute import Program
from moaic.runtime.group_transport import group_transport
from moaic.runtime.memory_transport import SharedMemoryTransport
from moaic.runtime.moves import Conversion, convert
from moaic.runtime.operation import Geometry, Operation, Operator, view
from moaic.runtime.physical import Physical, physical_of
from moaic.runtime.schema import DTYPE_NAMES, DTYPES
from moaic.runtime.shared import SPINS, Mailbox, PeerLost
from moaic.runtime.shortage import shortage_of
from moaic.runtime.station import Station
from moaic.runtime.threads import cores
from moaic.runtime.trace import Trace
from moaic.runtime.transport import Carrier, Transport
from moaic.runtime.wire import Closed, Connection, Message, as_block, from_block, memory

Converter = Callable[[Tensor | None], Tensor | None]


class Worker:
    """The buffers of one device and what can be done with them."""

    def __init__(self, station: Station, mailbox: Mailbox) -> None:
        self.rank = station.rank
        self.station = station
        self._mailbox = mailbox
        self.table: dict[int, Tensor] = {}
        self.idle_bytes = station.physical.taken()
        self._operators: dict[int, Operator] = {}
        self._paths: dict[int, tuple[str, Converter]] = {}
        self._programs: dict[int, Program] = {}
        self._trace = Trace(station.physical.synchronize)
        self._step = -1
        self._step_end: float | None = None
        self._commands: Mapping[int, Callable[..., None]] = {
            Code.PUT: self._put,
            Code.FILL: self._fill,
            Code.DEFINE: self._define,
            Code.OPERATE: self._operate,
            Code.PATH: self._path,
            Code.MOVE: self._move,
            Code.LOAD: self._load,
            Code.RUN: self._run,
            Code.FREE: self._free,
            Code.FORGET: self._operators.clear,
            Code.RESTORE: self._restore,
        }
        self._requests: Mapping[int, Callable[..., tuple[Any, Tensor | None] | None]] = {
            Code.FETCH: self._fetch,
            Code.SYNCHRONIZE: self._synchronize,
            Code.REPORT: self._report,
            Code.LIST: self._list,
            Code.STORE: self._store,
            Code.TRACE: self._take_trace,
        }

    def do(self, command: Sequence[Any], blocks: Sequence[Tensor | None]) -> None:
        """Runs one command that is not a request."""
        code, line, *arguments = command
        self._step = -1
        self._mailbox.begin(line, code, arguments[0] if code in _NAMED else -1)
        if code == Code.PUT:
            arguments[-1] = blocks[arguments[-1]]
        if self._trace.on and code != Code.RUN:
            self._trace.begin(self.what(command), "command")
        self._commands[code](*arguments)
        self._trace.end()

    def answer(self, command: Sequence[Any]) -> tuple[Any, Tensor | None] | None:
        """What a request asks for, as plain data and perhaps a block; None if this worker need not answer."""
        code, line, _, *arguments = command
        self._mailbox.begin(line, code, -1)
        return self._requests[code](*arguments)

    def what(self, command: Sequence[Any]) -> str:
        """Names a command, for messages."""
        code, _, *arguments = command
        subject = arguments[0] if arguments else None
        if code == Code.OPERATE and subject in self._operators:
            return self._operators[subject].name
        if code == Code.MOVE and subject in self._paths:
            return f"moving a value from {self._paths[subject][0]}"
        if code == Code.RUN and subject in self._programs:
            return f"{self._programs[subject].what(self._step)} of program {subject}"
        if code == Code.LOAD:
            return f"compiling program {subject}"
        return Code(code).name.lower()

    def _put(self, buffer_id: int, dtype: str, shape: Sequence[int], block: Tensor | None) -> None:
        if block is not None:
            self.table[buffer_id] = self.station.physical.taken_in(from_block(block, DTYPES[dtype], shape))

    def _fill(self, buffer_id: int, dtype: str, shape: Sequence[int], ranks: Sequence[int], value: Any) -> None:
        if self.rank in ranks:
            empty = torch.empty(tuple(shape), dtype=DTYPES[dtype], device=self.station.device)
            self.table[buffer_id] = empty if value is None else empty.fill_(value)

    def _define(self, number: int, operation: Any) -> None:
        self._operators[number] = Operator(Operation.decoded(operation), self.station)

    def _operate(self, number: int, ids: Sequence[int], scalars: Sequence[Any], outputs: Sequence[int]) -> None:
        self._operators[number].run(self.table, ids, scalars, outputs)

    def _path(self, number: int, conversion: Any) -> None:
        decoded = Conversion.decoded(conversion)
        name = f"{decoded.before.mesh} to {decoded.after.mesh}"
        self._paths[number] = (name, convert(decoded, self.station))

    def _move(self, number: int, source: int, target: int) -> None:
        old = self.table.get(source)
        new = self._paths[number][1](old)
        if new is None:
            self.table.pop(target, None)
        elif old is None or not _same_memory(new, old):
            self.table[target] = new
        elif new is not old or source != target:
            self.table[target] = new.clone()

    def _load(self, number: int, text: str, compiled: bool, recorded: bool) -> None:
        for program in self._programs.values():
            program.forget_recording()
        note = partial(self._note, number)
        self._programs[number] = Program(text, self.station, compiled=compiled, recorded=recorded, note=note)

    def _note(self, number: int, index: int) -> None:
        self._step = index
        self._mailbox.step(index)
        if self._trace.on:
            self._trace.begin(*self._programs[number].label(index))

    def _run(
        self, number: int, inputs: Sequence[int], outputs: Sequence[int | None], key: Sequence[int] | None
    ) -> None:
        program = self._programs[number]
        if not program.takes_part:
            return
        wanted = [buffer_id is not None for buffer_id in outputs]
        given = [self.table.get(buffer_id) for buffer_id in inputs]
        results = program.run(given, key, wanted, as_written=self._trace.on)
        if program.makes_gradients:
            self._finish_step(program)
        for buffer_id, tensor in zip(outputs, results, strict=True):
            if buffer_id is not None and tensor is not None:
                self.table[buffer_id] = tensor

    def _finish_step(self, program: Program) -> None:
        now = time.perf_counter()
        self._mailbox.finish_step(program.record.last_run if self._step_end is None else now - self._step_end)
        self._step_end = now

    def _free(self, ids: Sequence[int]) -> None:
        for buffer_id in ids:
            self.table.pop(buffer_id, None)

    def _fetch(self, buffer_id: int, geometry: Sequence[Any] | None, ranks: Sequence[int]) -> tuple[Any, Tensor] | None:
        if self.rank not in ranks:
            return None
        if geometry is None:
            tensor = self.table[buffer_id]
        else:
            base, shape, strides, offset, dtype = geometry
            tensor = view(self.table, buffer_id, Geometry(tuple(base), tuple(shape), tuple(strides), offset, dtype))
        return [DTYPE_NAMES[tensor.dtype], list(tensor.shape)], as_block(tensor.resolve_conj().resolve_neg())

    def _store(self, paths: Sequence[str], items: Sequence[Sequence[Any]]) -> tuple[Any, None]:
        return files.write(paths[self.rank], items[self.rank], self.table), None

    def _restore(
        self, buffer_id: int, dtype: str, shape: Sequence[int], held: Sequence[Any], sources: Sequence[Any]
    ) -> None:
        if (mine := held[self.rank]) is not None:
            given = [files.Source(*source) for source in sources]
            read = files.read(tuple(shape), dtype, [files.Box(*box) for box in mine], given)
            self.table[buffer_id] = self.station.physical.taken_in(read)

    def _synchronize(self) -> tuple[None, None]:
        self.station.physical.synchronize()
        return None, None

    def _report(self, forget_peak: bool) -> tuple[Any, None]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.table.values())
        programs = {
            number: program.record.encoded() for number, program in self._programs.items() if program.takes_part
        }
        report = {
            "pid": os.getpid(),
            "pss": self.station.physical.resident(),
            "buffers": len(self.table),
            "bytes": size,
            "programs": programs,
            "peak": self.station.physical.peak(),
        }
        if forget_peak:
            self.station.physical.forget_peak()
        return report, None

    def _take_trace(self, on: bool) -> tuple[Any, None]:
        return self._trace.take(on=on), None

    def _list(self) -> tuple[Any, None]:
        rows = [
            [
                buffer_id,
                DTYPE_NAMES[tensor.dtype],
                list(tensor.shape),
                hashlib.sha256(memory(as_block(tensor))).hexdigest(),
            ]
            for buffer_id, tensor in sorted(self.table.items())
        ]
        return rows, None


_NAMED: Final = frozenset({Code.OPERATE, Code.MOVE, Code.LOAD, Code.RUN})
"""Commands whose first argument says which operation, conversion or program is meant."""


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


BEAT_MILLISECONDS: Final = 1000


def serve(worker: Worker, mailbox: Mailbox, connection: Connection) -> None:
    """Does what the messages say until the connection ends or something fails; then only tells what failed."""
    failure: list[Any] | None = None
    while True:
        try:
            message = connection.receive()
        except MEMORY_ERRORS as error:
            # The rest of the message has no place to go, so there is no next one.
            _tell(_failure(worker, [-1, -1], error), mailbox, connection)
            threading.Event().wait()
            return
        if failure is None:
            failure = _serve_message(worker, connection, message)
            if failure is not None:
                _tell(failure, mailbox, connection)


MEMORY_ERRORS: Final = (MemoryError, RuntimeError)
"""What PyTorch raises where it gets no memory."""


def _tell(failure: list[Any], mailbox: Mailbox, connection: Connection) -> None:
    mailbox.fail()
    connection.send([NO_REQUEST, Answer.FAILED, *failure])


def _serve_message(worker: Worker, connection: Connection, message: Message) -> list[Any] | None:
    """Runs a message's commands; what failed, if something did."""
    command: Sequence[Any] = [-1, -1]
    try:
        _, commands = message.body
        for command in commands:
            if command[0] in REQUESTS:
                answer = worker.answer(command)
                if answer is not None:
                    data, block = answer
                    connection.send([command[2], Answer.DONE if block is None else Answer.VALUE, data], [block])
            else:
                worker.do(command, message.blocks)
    except Closed:
        raise
    except BaseException as error:
        return _failure(worker, command, error)
    return None


def _failure(worker: Worker, command: Sequence[Any], error: BaseException) -> list[Any]:
    what = worker.what(command) if command[0] >= 0 else "receiving a value"
    text = f"{type(error).__name__}: {error}"
    short = shortage_of(error, worker.station.physical, worker.idle_bytes)
    missing = None if short is None else [short.asked, short.free, short.held]
    trace = "".join(traceback.format_exception(error))
    return [command[1], what, text, trace, isinstance(error, PeerLost), missing]


def end() -> None:
    """Ends this process at once, and with it every process that it started."""
    if os.getpid() == os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def watch(descriptor: int, mailbox: Mailbox, physical: Physical) -> None:
    """Ends this process when the other end of its socket is gone, whatever it is busy with; gives signs of life."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    while not poll.poll(BEAT_MILLISECONDS):
        mailbox.beat(physical.apart())
    end()


def _transport(carrier: Carrier, mailbox: Mailbox, store: int, physical: Physical) -> Transport:
    if carrier is Carrier.MEMORY:
        return SharedMemoryTransport(mailbox)
    return group_transport(carrier, store, mailbox.alike, physical)


def work(
    rank: int,
    descriptor: int,
    memory: int,
    lifeline: int,
    peers: Sequence[int],
    threads: int,
    device: str,
    carrier: str,
    store: int,
    prepare: Callable[[], None],
) -> None:
    """Is worker `rank` until the socket ends.

    `lifeline` reaches its end for the others when this process ends; those of the others are `peers`. At `store` they
    find each other. What `prepare` does takes a while and is worth doing before the first program comes.
    """
    for inherited in (descriptor, memory, lifeline, store, *peers):
        os.set_inheritable(inherited, False)
    ranks = len(peers) + 1
    mailbox = Mailbox(memory, rank, ranks, peers, SPINS if ranks <= cores() else 0)
    physical = physical_of(device)
    threading.Thread(target=watch, args=(descriptor, mailbox, physical), name="watch", daemon=True).start()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    physical.begin()
    connection = Connection(socket.socket(fileno=descriptor), physical.room)
    try:
        connection.send([NO_REQUEST, Answer.HELLO, os.getpid()])
        threading.Thread(target=prepare, name="prepare", daemon=True).start()
        transport = _transport(Carrier(carrier), mailbox, store, physical)
        serve(Worker(Station(rank, physical, transport), mailbox), mailbox, connection)
    except Closed:
        end()
