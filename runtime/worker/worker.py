"""A worker: one process per backend device, which does what the controller's messages say until their socket ends."""

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
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import DeviceBackend, backend_of
from moaic.runtime.comm.process_group_transport import group_transport
from moaic.runtime.comm.reshard import convert, meeting
from moaic.runtime.comm.shm_slots import SPINS, GivenUp, Mailbox, PeerLost
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import Transport
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPE_NAMES, DTYPES
from moaic.runtime.host.cores import cores
from moaic.runtime.protocol.boxes import Box, FileSource
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.commands import NO_REQUEST, REQUESTS, AnswerCode, Code
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.operation import Operation, ViewGeometry
from moaic.runtime.protocol.wire import Closed, Connection, Message, as_block, from_block, memory
from moaic.runtime.worker import checkpoint_io
from moaic.runtime.worker.eager_op import EagerOp, view
from moaic.runtime.worker.oom import shortage_of
from moaic.runtime.worker.program import Program
from moaic.runtime.worker.trace import Trace
from moaic.runtime.worker.trouble import LASTING, Spoilt, Trouble

Converter = Callable[[Tensor | None], Tensor | None]
Result = TypeVar("Result")


class _Path(NamedTuple):
    """A conversion, and who does it together."""

    name: str
    run: Converter
    together: Sequence[int]
    gives: bool
    """Whether this worker has a part in the end."""


class _Effects(NamedTuple):
    """Ids of the buffers that a command reads, makes and writes; those written have, or get, a value here."""

    reads: Sequence[int]
    makes: Sequence[int]
    writes: Sequence[int]


class Worker:
    """The buffers of one device and what can be done with them."""

    def __init__(self, context: WorkerContext, mailbox: Mailbox, raised: Callable[[list[Any]], None]) -> None:
        """`raised` tells the controller of a command that failed."""
        self.rank = context.rank
        self.context = context
        self._mailbox = mailbox
        self.table: dict[int, Tensor] = {}
        self.idle_bytes = context.backend.private_bytes()
        self._operators: dict[int, EagerOp] = {}
        self._paths: dict[int, _Path] = {}
        self._programs: dict[int, Program] = {}
        self._loads: dict[int, int] = {}
        """By program the number of the command that loads it, which is to blame if there is none."""
        self._trace = Trace(context.backend.synchronize)
        self._trouble = Trouble(self.table)
        self._raised = raised
        self._number, self._command = -1, NOTHING
        self._root: int | None = None
        self._is_exposed = False
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
            Code.TOLD: self._trouble.told,
        }
        self._requests: Mapping[int, Callable[..., tuple[Any, Tensor | None] | None]] = {
            Code.FETCH: self._fetch,
            Code.SYNCHRONIZE: self._synchronize,
            Code.REPORT: self._report,
            Code.LIST: self._list,
            Code.STORE: self._store,
            Code.TRACE: self._take_trace,
            Code.SETTLE: lambda: (self._trouble.report(), None),
        }

    def do(self, number: int, command: Sequence[Any], blocks: Sequence[Tensor | None]) -> None:
        """Runs one command that is not a request."""
        code, line, *arguments = command
        self._step, self._number, self._command = -1, number, command
        self._mailbox.begin(line, code, arguments[0] if code in _NAMED else -1)
        if code == Code.PUT:
            arguments[-1] = blocks[arguments[-1]]
        if self._trace.on and code != Code.RUN:
            self._trace.begin(self.what(command), "command")
        if self._trouble.is_on:
            self._do_in_trouble(command, arguments)
        else:
            self._commands[code](*arguments)
        self._trace.end()

    def _do_in_trouble(self, command: Sequence[Any], arguments: Sequence[Any]) -> None:
        """Runs a command whose operands may be spoilt, or its writes withheld. Raises Spoilt."""
        effects = self._effects(command)
        new = [each for each in (*effects.makes, *effects.writes) if each not in self.table]
        self._root = self._trouble.root_of(effects.reads)
        if self._root is None and self._trouble.withholds(effects.writes):
            self._root = self._trouble.first
        try:
            if self._root is not None and not self._meets(command):
                raise Spoilt(self._root)
            self._commands[command[0]](*arguments)
        finally:
            self._root = None
        self._trouble.made(new)

    def give_up(self, error: Exception) -> None:
        """Has what the command that failed would have made count as spoilt."""
        self._trace.end()
        effects, began = self._effects(self._command), not isinstance(error, Spoilt)
        self._trouble.keep_out(self.failed(error), self._number, effects.makes, effects.writes, began=began)

    def _effects(self, command: Sequence[Any]) -> _Effects:
        code, _, *arguments = command
        if code in (Code.PUT, Code.FILL, Code.RESTORE):
            return self._giving((), arguments[0])
        if code == Code.OPERATE and arguments[0] in self._operators:
            number, ids, _, outputs = arguments
            written = self._operators[number].written(ids)
            return _Effects(ids, outputs, [each for each in written if each in self.table])
        if code == Code.MOVE and arguments[0] in self._paths:
            return self._effects_of_move(*arguments)
        if code == Code.RUN:
            _, inputs, outputs, _ = arguments
            return _Effects(inputs, [each for each in outputs if each is not None], ())
        return _Effects((), (), ())

    def _effects_of_move(self, path: int, source: int, target: int) -> _Effects:
        if source != target:
            return self._giving((source,), target) if self._paths[path].gives else _Effects((source,), (), ())
        # Where a value lies is no matter of what it is: it is brought elsewhere although its writes are withheld.
        return _Effects((source,) if self._trouble.is_spoilt(source) else (), (target,), ())

    def _giving(self, reads: Sequence[int], target: int) -> _Effects:
        """Of a command that gives a whole value to a buffer that may have one."""
        return _Effects(reads, (), (target,)) if target in self.table else _Effects(reads, (target,), ())

    def _meets(self, command: Sequence[Any]) -> bool:
        """Whether a command is done by several workers together, which agree on what becomes of it."""
        code, _, *arguments = command
        if code == Code.OPERATE:
            return bool(self._operators[arguments[0]].together)
        return code in (Code.RUN, Code.MOVE)

    def _agreed(self, ranks: Sequence[int], act: Callable[[], Result], *, carries: bool = True) -> Result:
        """What `act` gives, which `ranks` do together. Raises Spoilt on all of them where one has no operand for it.

        So it does where one fails on the way, if the others can be called back from where they wait for it, as they
        can from all that carries no data.
        """
        peers = [rank for rank in ranks if rank != self.rank]
        if not peers:
            if self._root is not None:
                raise Spoilt(self._root)
            return act()
        self._mailbox.meet(peers, self._number + 1)
        if self.context.transport.can_be_given_up or not carries:
            return self._tried(act)
        self._part(self._root)
        self._is_exposed = True
        result = act()
        self._is_exposed = False
        return result

    def _tried(self, act: Callable[[], Result]) -> Result:
        result, root = None, self._root
        try:
            result = act() if root is None else None
        except GivenUp:
            pass
        except LASTING:
            raise
        except Exception as error:
            root = self.failed(error)
        self._part(root)
        return cast("Result", result)

    def _part(self, root: int | None) -> None:
        found = self._mailbox.part(root)
        if found is not None:
            raise Spoilt(found)

    def outlives(self, error: Exception) -> bool:
        """Whether this worker, and those that wait for it, can go on."""
        return not self._is_exposed and not isinstance(error, LASTING)

    def answer(self, command: Sequence[Any]) -> tuple[Any, Tensor | None] | None:
        """What a request asks for, as plain data and perhaps a block; None if this worker need not answer."""
        code, line, request, *arguments = command
        self._number, self._command = -2 - request, command
        self._mailbox.begin(line, code, -1)
        return self._requests[code](*arguments)

    def failed(self, error: BaseException) -> int:
        """Which command is to blame for an error; the controller is told of one that is new."""
        if isinstance(error, Spoilt):
            return error.root
        self._raised([self._number, *self.failure(error)])
        return self._number

    def failure(self, error: BaseException) -> list[Any]:
        """What the controller is told of an error in what is being done."""
        what = self.what(self._command) if self._command[0] >= 0 else "receiving a value"
        short = shortage_of(error, self.context.backend, self.idle_bytes)
        missing = None if short is None else [short.asked, short.free, short.held]
        trace = "".join(traceback.format_exception(error))
        return [self._command[1], what, type(error).__name__, str(error), trace, isinstance(error, PeerLost), missing]

    def rest(self) -> None:
        """Nothing is being done: what fails now is the receiving."""
        self._command = NOTHING

    def what(self, command: Sequence[Any]) -> str:
        """Names a command, for messages."""
        code, _, *arguments = command
        subject = arguments[0] if arguments else None
        if code == Code.OPERATE and subject in self._operators:
            return self._operators[subject].name
        if code == Code.MOVE and subject in self._paths:
            return f"moving a value from {self._paths[subject].name}"
        if code == Code.RUN and subject in self._programs:
            return f"{self._programs[subject].what(self._step)} of program {subject}"
        if code == Code.LOAD:
            return f"compiling program {subject}"
        return Code(code).name.lower()

    def _put(self, buffer_id: int, dtype: str, shape: Sequence[int], block: Tensor | None) -> None:
        if block is not None:
            self.table[buffer_id] = self.context.backend.to_device(from_block(block, DTYPES[dtype], shape))

    def _fill(self, buffer_id: int, dtype: str, shape: Sequence[int], ranks: Sequence[int], value: Any) -> None:
        if self.rank in ranks:
            empty = torch.empty(tuple(shape), dtype=DTYPES[dtype], device=self.context.device)
            self.table[buffer_id] = empty if value is None else empty.fill_(value)

    def _define(self, number: int, operation: Any) -> None:
        self._operators[number] = EagerOp(Operation.decoded(operation), self.context)

    def _operate(self, number: int, ids: Sequence[int], scalars: Sequence[Any], outputs: Sequence[int]) -> None:
        operator = self._operators[number]
        if operator.together:
            self._agreed(operator.together, lambda: operator.run(self.table, ids, scalars, outputs))
        else:
            operator.run(self.table, ids, scalars, outputs)

    def _path(self, number: int, conversion: Any) -> None:
        decoded = Resharding.decoded(conversion)
        name = f"{decoded.before.mesh} to {decoded.after.mesh}"
        gives = self.rank in decoded.after.holders
        self._paths[number] = _Path(name, convert(decoded, self.context), meeting(decoded, self.rank), gives)

    def _move(self, number: int, source: int, target: int) -> None:
        old, path = self.table.get(source), self._paths[number]
        new = self._agreed(path.together, lambda: path.run(old))
        if new is None:
            self.table.pop(target, None)
        elif old is None or not _same_memory(new, old):
            self.table[target] = new
        elif new is not old or source != target:
            self.table[target] = new.clone()

    def _load(self, number: int, text: str, compiled: bool, recorded: bool, ranks: int) -> None:
        for program in self._programs.values():
            program.forget_recording()
        self._loads[number] = self._number
        note = partial(self._note, number)
        load = partial(Program, text, self.context, compiled=compiled, recorded=recorded, note=note)
        self._programs[number] = self._agreed(range(ranks) if self.rank < ranks else (), load, carries=False)

    def _note(self, number: int, index: int) -> None:
        self._step = index
        self._mailbox.step(index)
        if self._trace.on:
            self._trace.begin(*self._programs[number].label(index))

    def _run(
        self, number: int, inputs: Sequence[int], outputs: Sequence[int | None], key: Sequence[int] | None
    ) -> None:
        program = self._programs.get(number)
        if program is None:
            raise Spoilt(self._loads[number])
        if not program.takes_part:
            return
        wanted = [buffer_id is not None for buffer_id in outputs]
        given = [self.table.get(buffer_id) for buffer_id in inputs]
        run = partial(program.run, given, key, wanted, as_written=self._trace.on)
        del given
        results = self._agreed(range(program.mesh.ranks), run)
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
        if self._trouble.is_on:
            self._trouble.freed(ids)

    def _fetch(self, buffer_id: int, geometry: Sequence[Any] | None, ranks: Sequence[int]) -> tuple[Any, Tensor] | None:
        if self.rank not in ranks:
            return None
        self._trouble.check((buffer_id,))
        if geometry is None:
            tensor = self.table[buffer_id]
        else:
            base, shape, strides, offset, dtype = geometry
            tensor = view(self.table, buffer_id, ViewGeometry(tuple(base), tuple(shape), tuple(strides), offset, dtype))
        return [DTYPE_NAMES[tensor.dtype], list(tensor.shape)], as_block(tensor.resolve_conj().resolve_neg())

    def _store(self, paths: Sequence[str], items: Sequence[Sequence[Any]]) -> tuple[Any, None]:
        self._trouble.check(item[0] for item in items[self.rank])
        return checkpoint_io.write(paths[self.rank], items[self.rank], self.table), None

    def _restore(
        self, buffer_id: int, dtype: str, shape: Sequence[int], held: Sequence[Any], sources: Sequence[Any]
    ) -> None:
        if (mine := held[self.rank]) is not None:
            given = [FileSource(*source) for source in sources]
            read = checkpoint_io.read(tuple(shape), dtype, [Box(*box) for box in mine], given)
            self.table[buffer_id] = self.context.backend.to_device(read)

    def _synchronize(self) -> tuple[None, None]:
        self.context.backend.synchronize()
        if self._trouble.first is not None:
            raise Spoilt(self._trouble.first)
        return None, None

    def _report(self, forget_peak: bool) -> tuple[Any, None]:
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.table.values())
        programs = {
            number: program.record.encoded() for number, program in self._programs.items() if program.takes_part
        }
        report = {
            "pid": os.getpid(),
            "pss": self.context.backend.resident_bytes(),
            "buffers": len(self.table),
            "bytes": size,
            "programs": programs,
            "peak": self.context.backend.peak(),
        }
        if forget_peak:
            self.context.backend.forget_peak()
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


NOTHING: Final[Sequence[Any]] = (-1, -1)
"""In place of a command where there is none."""

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
            _tell(worker.failure(error), mailbox, connection)
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
    connection.send([NO_REQUEST, AnswerCode.FAILED, *failure])


def _serve_message(worker: Worker, connection: Connection, message: Message) -> list[Any] | None:
    """Runs a message's commands; what failed for good, if something did."""
    first, commands = message.body
    try:
        for number, command in enumerate(commands, first):
            if command[0] in REQUESTS:
                _answer(worker, connection, command)
            else:
                _do(worker, number, command, message.blocks)
    except Closed:
        raise
    except BaseException as error:
        return worker.failure(error)
    worker.rest()
    return None


def _raised(connection: Connection, failure: list[Any]) -> None:
    connection.send([NO_REQUEST, AnswerCode.RAISED, *failure])


def _do(worker: Worker, number: int, command: Sequence[Any], blocks: Sequence[Tensor | None]) -> None:
    """Runs a command; what it fails to make is spoilt, and the worker goes on. Raises what is lasting."""
    try:
        worker.do(number, command, blocks)
    except Exception as error:
        if not worker.outlives(error):
            raise
        worker.give_up(error)


def _answer(worker: Worker, connection: Connection, command: Sequence[Any]) -> None:
    request = command[2]
    try:
        answer = worker.answer(command)
    except Exception as error:
        if not worker.outlives(error):
            raise
        connection.send([request, AnswerCode.SPOILT, worker.failed(error)])
        return
    if answer is not None:
        data, block = answer
        connection.send([request, AnswerCode.DONE if block is None else AnswerCode.VALUE, data], [block])


def end() -> None:
    """Ends this process at once, and with it every process that it started."""
    if os.getpid() == os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def watch(descriptor: int, mailbox: Mailbox, backend: DeviceBackend) -> None:
    """Ends this process when the other end of its socket is gone, whatever it is busy with; gives signs of life."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    while not poll.poll(BEAT_MILLISECONDS):
        mailbox.beat(backend.device_bytes())
    end()


def _transport(carrier: Carrier, mailbox: Mailbox, store: int, backend: DeviceBackend) -> Transport:
    if carrier is Carrier.MEMORY:
        return SharedMemoryTransport(mailbox)
    return group_transport(carrier, store, mailbox.agree, backend)


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
    backend = backend_of(device)
    threading.Thread(target=watch, args=(descriptor, mailbox, backend), name="watch", daemon=True).start()
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    backend.begin()
    connection = Connection(socket.socket(fileno=descriptor), backend.staging)
    try:
        connection.send([NO_REQUEST, AnswerCode.HELLO, os.getpid()])
        threading.Thread(target=prepare, name="prepare", daemon=True).start()
        transport = _transport(Carrier(carrier), mailbox, store, backend)
        worker = Worker(WorkerContext(rank, backend, transport), mailbox, partial(_raised, connection))
        serve(worker, mailbox, connection)
    except Closed:
        end()
