"""The buffers of one worker, and the commands that make, write and free them."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from moaic.runtime.comm.bundle import LocalResharding, local_resharding, reshard_all
from moaic.runtime.comm.peer_links import Unreachable
from moaic.runtime.comm.reshard import own
from moaic.runtime.comm.shm_slots import Mailbox, PeerLost
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.disk import CannotWrite
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.protocol.boxes import Box, FileSource
from moaic.runtime.protocol.commands import (
    CODES,
    Adopt,
    AnswerCode,
    Command,
    Define,
    DefineResharding,
    Fill,
    Forget,
    Free,
    Load,
    Operate,
    Put,
    Request,
    Reshard,
    Restore,
    ResumeWrites,
    Run,
    name_of,
    subject_of,
)
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.operation import Operation
from moaic.runtime.protocol.wire import from_block
from moaic.runtime.worker import checkpoint_io
from moaic.runtime.worker.adoption import ELSEWHERE, adopt
from moaic.runtime.worker.agreement import Agreement
from moaic.runtime.worker.background import BackgroundCompiler
from moaic.runtime.worker.eager_op import EagerOp
from moaic.runtime.worker.failed_commands import FATAL, FailedCommands, Poisoned
from moaic.runtime.worker.oom import is_out_of_memory, shortage_of
from moaic.runtime.worker.program import Program, Record
from moaic.runtime.worker.requests import Answer, Requests
from moaic.runtime.worker.tracer import Tracer


class _DefinedResharding(NamedTuple):
    """A resharding, and the ranks that run it together."""

    name: str
    local: LocalResharding
    together: Sequence[int]
    gives: bool
    """Whether this worker holds a part of the result."""


class _Effects(NamedTuple):
    """Ids of the buffers that a command reads, makes and overwrites on this worker."""

    reads: Sequence[int] = ()
    makes: Sequence[int] = ()
    writes: Sequence[int] = ()


class Worker:
    """Runs commands, one at a time, on the buffers of one device."""

    def __init__(
        self,
        context: WorkerContext,
        mailbox: Mailbox,
        background: BackgroundCompiler,
        report: Callable[[AnswerCode, list[Any]], None],
    ) -> None:
        """`report` sends an answer without a request to the controller."""
        self.context: Final = context
        self.table: Final[dict[int, Tensor]] = {}
        self.idle_bytes: Final = context.backend.private_bytes()
        self._mailbox: Final = mailbox
        self._background: Final = background
        self._report: Final = report
        self._operators: dict[int, EagerOp] = {}
        self._reshardings: dict[int, _DefinedResharding] = {}
        self._programs: dict[int, Program] = {}
        self._marks: dict[int, str] = {}
        self._reasons: set[str] = set()
        self._loads: dict[int, int] = {}
        """The number of the Load command of each program, which caused the error if the program is missing."""
        self._tracer: Final = Tracer(context.backend.synchronize)
        self._failures: Final = FailedCommands(self.table)
        self._agreement: Final = Agreement(mailbox, context.transport, self.failed)
        self.requests: Final = Requests(context, self.table, self._programs, self._failures, self._tracer)
        self._command: Command | None = None
        self._number = -1
        self._blocks: Sequence[Tensor | None] = ()
        self._step = -1
        self._step_end: float | None = None
        self.handlers: Final[Mapping[type[Command], Callable[[Any], None]]] = {
            Put: self._put,
            Fill: self._fill,
            Define: self._define,
            Operate: self._operate,
            DefineResharding: self._define_resharding,
            Reshard: self._reshard,
            Load: self._load,
            Run: self._run,
            Adopt: self._adopt,
            Free: self._free,
            Forget: self._forget,
            Restore: self._restore,
            ResumeWrites: self._resume_writes,
        }

    def do(self, number: int, command: Command, blocks: Sequence[Tensor | None]) -> None:
        """Run one command that is not a request, with the blocks of its message."""
        self._begin(number, command, subject_of(command))
        self._blocks, self._step = blocks, -1
        if self._tracer.on and not isinstance(command, Run):
            self._tracer.begin(self.describe(command), "command")
        if self._failures.is_on:
            self._do_after_failure(command)
        else:
            self.handlers[type(command)](command)
        self._tracer.end()

    def answer(self, request: Request) -> Answer | None:
        """The answer to a request; None if only other workers answer."""
        self._begin(-2 - request.request, request, -1)
        return self.requests.answer(request)

    def _begin(self, number: int, command: Command, subject: int) -> None:
        self._number = self._agreement.number = number
        self._command = command
        self._mailbox.begin(command.line, CODES[type(command)], subject)

    def idle(self) -> None:
        """Mark that no command runs: a later error is one of receiving a message."""
        self._command, self._blocks = None, ()

    # Commands that fail.

    def _do_after_failure(self, command: Command) -> None:
        """Run a command while buffers are poisoned or writes withheld. Raises Poisoned if these prevent it."""
        effects = self._effects(command)
        new = [each for each in (*effects.makes, *effects.writes) if each not in self.table]
        root = self._failures.root_of(effects.reads)
        if root is None and self._failures.withholds(effects.writes):
            root = self._failures.first
        self._agreement.root = root
        try:
            if root is not None and not self._is_joint(command):
                raise Poisoned(root)
            self.handlers[type(command)](command)
        finally:
            self._agreement.root = None
        self._failures.made(new)

    def _is_joint(self, command: Command) -> bool:
        """Whether several workers may run a command together, and so agree on its failure."""
        if isinstance(command, Operate):
            return bool(self._operators[command.number].together)
        return isinstance(command, Run | Reshard)

    def give_up(self, error: Exception) -> None:
        """Poison the results of the failed command."""
        self._tracer.end()
        assert self._command is not None
        effects, began = self._effects(self._command), not isinstance(error, Poisoned)
        self._failures.record_failure(self.failed(error), self._number, effects.makes, effects.writes, began=began)
        if is_out_of_memory(error):
            # What is tried instead may have their memory.
            self._release_graphs()

    def _effects(self, command: Command) -> _Effects:
        match command:
            case Put() | Fill() | Restore():
                return self._giving((), command.buffer)
            case Operate() if command.number in self._operators:
                written = self._operators[command.number].written(command.operands)
                return _Effects(command.operands, command.outputs, [each for each in written if each in self.table])
            case Reshard() if all(number in self._reshardings for number, _, _ in command.moves):
                return self._effects_of_resharding(command)
            case Run():
                return _Effects(command.inputs, [each for each in command.outputs if each is not None])
            case _:
                return _Effects()

    def _effects_of_resharding(self, command: Reshard) -> _Effects:
        each = [self._effects_of_move(*move) for move in command.moves]
        reads, makes, writes = ([buffer for kind in kinds for buffer in kind] for kinds in zip(*each, strict=True))
        return _Effects(reads, makes, writes)

    def _effects_of_move(self, number: int, source: int, target: int) -> _Effects:
        if source != target:
            gives = self._reshardings[number].gives
            return self._giving((source,), target) if gives else _Effects((source,))
        # Resharding in place changes no value, so it runs even while writes are withheld.
        return _Effects((source,) if self._failures.is_poisoned(source) else (), (target,))

    def _giving(self, reads: Sequence[int], target: int) -> _Effects:
        """The effects of a command that sets a whole buffer, which may have a value already."""
        return _Effects(reads, (), (target,)) if target in self.table else _Effects(reads, (target,))

    def survives(self, error: Exception) -> bool:
        """Whether this worker and those that wait for it can continue after an error."""
        return not self._agreement.is_exposed and not isinstance(error, FATAL)

    def failed(self, error: BaseException) -> int:
        """The number of the command that caused an error; a new failure is reported to the controller."""
        if isinstance(error, Poisoned):
            return error.root
        self._report(AnswerCode.RAISED, [self._number, *self.failure(error)])
        return self._number

    def failure(self, error: BaseException) -> list[Any]:
        """The data of a FAILED answer for an error of the current command."""
        line, name = (
            (-1, "receiving a value") if self._command is None else (self._command.line, self.describe(self._command))
        )
        shortage = shortage_of(error, self.context.backend, self.idle_bytes)
        missing = None if shortage is None else [shortage.asked, shortage.free, shortage.held]
        trace = "" if isinstance(error, (Unreachable, CannotWrite)) else "".join(traceback.format_exception(error))
        return [line, name, type(error).__name__, str(error), trace, isinstance(error, PeerLost), missing]

    def describe(self, command: Command) -> str:
        """The name of a command in messages."""
        match command:
            case Operate() if command.number in self._operators:
                return self._operators[command.number].name
            case Reshard() if command.moves[0][0] in self._reshardings:
                number, count = command.moves[0][0], len(command.moves)
                values = "a value" if count == 1 else f"{count} values"
                return f"moving {values} from {self._reshardings[number].name}"
            case Run() if command.program in self._programs:
                return f"{self._programs[command.program].describe(self._step)} of program {command.program}"
            case Load():
                return f"compiling program {command.program}"
            case _:
                return name_of(type(command))

    # Buffers.

    def _put(self, command: Put) -> None:
        block = self._blocks[command.block]
        if block is not None:
            value = from_block(block, DTYPES[command.dtype], command.shape)
            self.table[command.buffer] = self.context.backend.to_device(value)

    def _fill(self, command: Fill) -> None:
        if self.context.rank in command.ranks:
            value = torch.empty(tuple(command.shape), dtype=DTYPES[command.dtype], device=self.context.device)
            self.table[command.buffer] = value if command.value is None else value.fill_(command.value)

    def _restore(self, command: Restore) -> None:
        if (mine := command.held[self.context.rank]) is not None:
            sources = [FileSource(*source) for source in command.sources]
            read = checkpoint_io.read(tuple(command.shape), command.dtype, [Box(*box) for box in mine], sources)
            self.table[command.buffer] = self.context.backend.to_device(read)

    def _free(self, command: Free) -> None:
        for buffer in command.buffers:
            self.table.pop(buffer, None)
        if self._failures.is_on:
            self._failures.freed(command.buffers)

    def _resume_writes(self, command: ResumeWrites) -> None:
        self._failures.resume_writes(command.root, command.lost)

    def _define_resharding(self, command: DefineResharding) -> None:
        decoded = Resharding.decoded(command.resharding)
        rank, participants = self.context.rank, decoded.participants
        self._reshardings[command.number] = _DefinedResharding(
            name=f"{decoded.before.mesh} to {decoded.after.mesh}",
            local=local_resharding(decoded, self.context),
            together=participants if rank in participants else (),
            gives=rank in decoded.after.holders,
        )

    def _reshard(self, command: Reshard) -> None:
        reshardings = [self._reshardings[number] for number, _, _ in command.moves]
        before = [self.table.get(source) for _, source, _ in command.moves]
        local = [resharding.local for resharding in reshardings]
        run = partial(reshard_all, local, before, self.context)
        after = self._agreement.run(reshardings[0].together, run)
        for (_, source, target), old, new in zip(command.moves, before, after, strict=True):
            self._resharded(source, target, old, new)

    def _resharded(self, source: int, target: int, old: Tensor | None, new: Tensor | None) -> None:
        """Give a buffer its part after a resharding, which may share memory with the part before."""
        if new is None:
            self.table.pop(target, None)
        elif old is None or not _same_memory(new, old):
            self.table[target] = new if _fills_its_storage(new) else own(new)
        elif new is not old or source != target:
            self.table[target] = new.clone()

    # Eager ops.

    def _define(self, command: Define) -> None:
        self._operators[command.number] = EagerOp(Operation.decoded(command.operation), self.context)

    def _operate(self, command: Operate) -> None:
        _, number, operands, scalars, outputs = command
        operator = self._operators[number]
        if operator.together:
            self._agreement.run(operator.together, lambda: operator.run(self.table, operands, scalars, outputs))
        else:
            operator.run(self.table, operands, scalars, outputs)

    def _forget(self, command: Forget) -> None:
        self._operators.clear()

    # Programs.

    def _load(self, command: Load) -> None:
        self._release_graphs()
        number, record = command.program, Record()
        self._loads[number] = self._number
        if command.background:
            self._background.compile(command.text, record.compiled if self.context.rank < command.ranks else None)
        load = partial(
            Program,
            command.text,
            self.context,
            compiled=command.compiled,
            graphs=GraphMode(command.graphs),
            say=self._not_captured,
            background=command.background,
            note=partial(self._note, number),
            record=record,
        )
        ranks = range(command.ranks) if self.context.rank < command.ranks else ()
        self._programs[number] = self._agreement.run(ranks, load, carries=False)
        self._marks[number] = command.mark
        if command.compiled and not command.background and self.context.rank == 0:
            _set_mark(command.mark)

    def _release_graphs(self) -> None:
        for program in self._programs.values():
            program.release_graph()

    def _not_captured(self, reason: str) -> None:
        """Reported once by each rank that has the reason, which may come again in every run."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            self._report(AnswerCode.NOT_CAPTURED, [reason])

    def _adopt(self, command: Adopt) -> None:
        programs = [self._programs[number] for number in command.programs if number in self._programs]
        failed = adopt(programs, self.context)
        # Of what is compiled everywhere one worker tells, of what is not each that could not.
        if not programs or failed == ELSEWHERE or (not failed and self.context.rank != 0):
            return
        if not failed:
            for number in command.programs:
                _set_mark(self._marks[number])
        runs = max(program.record.runs for program in programs)
        functions = sum(program.functions for program in programs)
        seconds = time.monotonic() - programs[0].loaded
        self._report(AnswerCode.ADOPTED, [list(command.programs), functions, seconds, runs, failed])

    def _note(self, number: int, index: int) -> None:
        self._step = index
        self._mailbox.step(index)
        if self._tracer.on:
            self._tracer.begin(*self._programs[number].label(index))

    def _run(self, command: Run) -> None:
        program = self._programs.get(command.program)
        if program is None:
            raise Poisoned(self._loads[command.program])
        self._background.ran()
        if not program.takes_part:
            return
        wanted = [buffer is not None for buffer in command.outputs]
        given = [self.table.get(buffer) for buffer in command.inputs]
        modes = {"eager": self._tracer.on, "op_by_op": command.op_by_op}
        run = partial(program.run, given, command.key, wanted, command.sizes, **modes)
        del given
        results = self._agreement.run(range(program.mesh.ranks), run)
        if program.makes_gradients:
            self._finish_step(program)
        for buffer, tensor in zip(command.outputs, results, strict=True):
            if buffer is not None and tensor is not None:
                self.table[buffer] = tensor

    def _finish_step(self, program: Program) -> None:
        now = time.perf_counter()
        self._mailbox.finish_step(program.record.last_run if self._step_end is None else now - self._step_end)
        self._step_end = now


def _set_mark(path: str) -> None:
    """Make the file which says that the cache on disk has all functions of a program."""
    if path:
        with contextlib.suppress(OSError):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).touch()


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _fills_its_storage(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, but for padding: a part would keep the rest alive."""
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() < 2 * max(tensor.nbytes, 1)
