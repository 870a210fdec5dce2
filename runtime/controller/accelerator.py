"""The controller's view of the virtual accelerator: buffers, eager ops and programs, asynchronous and in order.

Commands are queued and sent in batches. Only calls that need an answer wait, such as `download` and `synchronize`. The
failure of a worker is raised by the first call after the controller has received it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor

from moaic.ir.graph import Function, Module
from moaic.ir.parser import parse
from moaic.runtime.controller.buffer import Buffer, View
from moaic.runtime.controller.buffers import Buffers
from moaic.runtime.controller.command_log import CommandRecorder, Log
from moaic.runtime.controller.deferral import Deferral, ForwardReader
from moaic.runtime.controller.deferred_forward import DeferredForward
from moaic.runtime.controller.eager_call import EagerCall, take_apart
from moaic.runtime.controller.eager_ops import EagerOps
from moaic.runtime.controller.errors import LateWarning, WorkerError
from moaic.runtime.controller.loaded_programs import LoadedPrograms
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.host.gpus import CPU
from moaic.runtime.launch.channel import Workers
from moaic.runtime.protocol.boxes import Box, FileSource, Shard, boxes, parts
from moaic.runtime.protocol.commands import (
    List,
    Load,
    Operate,
    ReadStatistics,
    Restore,
    Run,
    Store,
    Synchronize,
    Trace,
    kind_of,
    name_of,
)
from moaic.runtime.protocol.instruction_name import describe
from moaic.runtime.protocol.placement import spread
from moaic.runtime.protocol.shortage import Shortage
from moaic.runtime.protocol.span import ANSWERED_SPANS, TraceSpan, decoded
from moaic.runtime.protocol.statistics import Statistics, statistics

GREETING_SECONDS: Final = 0.5
"""Interval at which `welcome` receives messages while workers start."""


class Accelerator:
    """All workers as one device. Safe to call from several threads."""

    def __init__(self, workers: Workers[Tensor], *, record: bool = False) -> None:
        """With `record` every sent command is kept for `log`."""
        self._lock = threading.RLock()
        self._lines = SourceLines()
        self.carrier: Final = workers.carrier
        self._pool = WorkerPool(workers, self._lines, self._activity)
        self._recorder = CommandRecorder(self._pool.size) if record else None
        if self._recorder is not None:
            self._pool.record(self._recorder)
        self._buffers = Buffers(self._pool, self._lines)
        self._programs = LoadedPrograms(self._buffers)
        self._eager = EagerOps(self._buffers)
        self._deferral = Deferral(self._buffers, self._eager)

    @property
    def flavor(self) -> int:
        """Number of workers."""
        return self._pool.size

    @property
    def hosts(self) -> tuple[str, ...]:
        """The name of each worker's host; empty for this one."""
        return self._pool.hosts

    @property
    def has_gpus(self) -> bool:
        """Whether the workers compute on GPUs, real or emulated."""
        return any(device != CPU for device in self._pool.devices)

    def together(self) -> AbstractContextManager[object]:
        """For the time of the block no other thread uses the accelerator: for calls that belong together."""
        return self._lock

    # Buffers.

    def buffer(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Buffer:
        """Make a buffer without a value; it is row-major if no strides are given."""
        with self._lock:
            return self._buffers.make(dtype, shape, strides)

    def upload(self, buffer: Buffer, tensor: Tensor, *, is_kept: bool = False) -> None:
        """Set the whole buffer to the value of a tensor of its shape.

        The tensor is copied at once, unless `is_kept` says that the caller will not change it.
        """
        if tuple(tensor.shape) != buffer.shape:
            raise ValueError(f"{buffer} cannot take a tensor of shape {list(tensor.shape)}")
        copy = tensor.detach().to(device="cpu", dtype=DTYPES[buffer.dtype], copy=not is_kept)
        self._give(buffer, copy, None)

    def fill(self, buffer: Buffer, value: float | bool) -> None:
        """Set every element of the buffer to one value."""
        self._give(buffer, None, value)

    def _give(self, buffer: Buffer, host: Tensor | None, fill: float | bool | None) -> None:
        with self._lock:
            self._pool.check()
            self._deferral.about_to_write(buffer)
            buffer.host, buffer.fill = host, fill
            if buffer.place is not None:
                self._buffers.send_value(buffer, buffer.place)

    def download(self, view: View) -> Tensor:
        """The value of a device tensor, row-major, after all earlier commands have run. Raises WorkerError."""
        with self._lock:
            self._pool.check()
            self._deferral.force(view.buffer)
            return self._buffers.fetch(view)

    def parts(self, buffer: Buffer) -> tuple[Shard, ...]:
        """The parts of a value that the workers hold; none while the value is on the host or partial."""
        with self._lock:
            self._pool.check()
            self._deferral.force(buffer)
            place = buffer.place
            return () if place is None or place.layout.partial else parts(buffer.shape, place)

    def store(
        self, paths: Sequence[str], items: Sequence[Sequence[tuple[Buffer, Box]]]
    ) -> dict[int, list[tuple[int, int]]]:
        """Write boxes to one file per worker; return, per worker, the offset and length of each box in its file."""
        rows = [[(buffer.id, box.local, box.sizes) for buffer, box in row] for row in items]
        ranks = [rank for rank, row in enumerate(rows) if row]
        with self._lock:
            return self._pool.ask(Store(self._lines.here(), paths, rows), ranks)

    def restore(self, buffer: Buffer, sources: Sequence[FileSource]) -> None:
        """Set the buffer from files, of which each worker reads its part; a buffer without a placement is sharded."""
        with self._lock:
            self._pool.check()
            self._deferral.about_to_write(buffer)
            place = buffer.place
            if place is None or place.layout.partial:
                place = self._buffers.interned(spread(buffer.shape, self.flavor))
            held = [boxes(buffer.shape, place, rank) if rank in place.holders else None for rank in range(self.flavor)]
            shape = place.layout.local_shape(buffer.shape, place.mesh)
            self._pool.push(Restore(self._lines.here(), buffer.id, buffer.dtype, shape, held, sources))
            buffer.place, buffer.host, buffer.fill = place, None, None

    # Eager ops and programs.

    def launch(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Buffer]) -> None:
        """Queue an eager aten op.

        Device tensors among the arguments are views; 0-dim CPU tensors are sent by value. `outputs` take the results of
        a functional op; the schema tells which arguments an op writes in place or by `out=`. Raises TypeError for an
        argument that cannot be sent.
        """
        self.launch_call(take_apart(op, args, kwargs, [buffer.geometry for buffer in outputs]), outputs)

    def launch_call(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        """Queue an eager op whose call has been encoded already."""
        with self._lock:
            self._pool.check()
            self._deferral.launch(call, outputs)

    def load(
        self,
        text: str,
        *,
        compiled: bool = True,
        graphs: GraphMode = GraphMode.NEVER,
        background: bool = False,
        module: Module | None = None,
    ) -> int:
        """Send a program to the workers, which begin to compile it; return its number for `run`. Raises Diagnostic.

        By `graphs` the workers replay runs as CUDA graphs where their devices can. With `background` they go on
        while processes beside them compile: see `are_compiled`. `module` is the parsed text, if there is
        one already.
        """
        module = parse(text) if module is None else module
        with self._lock:
            self._pool.check()
            return self._programs.load(text, module, compiled=compiled, graphs=graphs, background=background)

    def are_compiled(self, programs: Sequence[int], *, at_once: bool = False) -> bool:
        """Whether runs of programs, which belong together, are compiled from now on; else they must be op by op.

        With `at_once` the workers wait for a compilation in the background.
        """
        with self._lock:
            return self._programs.are_compiled(programs, at_once=at_once)

    @property
    def is_compiling(self) -> bool:
        """Whether processes beside the workers compile a program."""
        with self._lock:
            return self._programs.is_compiling

    def program(self, number: int) -> Function:
        """The main function of a loaded program."""
        return self._programs.main(number)

    def run(
        self,
        program: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer | None],
        key: tuple[int, int] | None = None,
        *,
        sizes: tuple[int, ...] = (),
        op_by_op: bool = False,
        rest: Collection[Buffer] = (),
        fulfils: DeferredForward | None = None,
    ) -> int:
        """Queue a run of a program and send the queue; return the number of the command.

        `inputs` are the main function's parameters except its random key. `outputs` are its results, None for an
        unwanted one. An input whose placement differs from the parameter's type is resharded: for this run into a
        temporary copy, for buffers in `rest` in place. `fulfils` is the deferred forward whose values this run
        computes; the caller then calls its `fulfilled`. `sizes` are the numbers of the program's symbols. With
        `op_by_op` functions that are compiled in the background are interpreted.
        """
        with self._lock:
            self._pool.check()
            self._programs.check(program, inputs, outputs, key)
            self._deferral.clear_the_way(inputs, outputs, fulfils)
            return self._programs.run(program, inputs, outputs, key, rest, sizes, op_by_op=op_by_op)

    def shortage_in(self, run: int) -> Shortage | None:
        """The shortage by which a run failed, after waiting for it; None if it did not. Raises no failure of an op."""
        with self._lock:
            return self._pool.shortage_in(run)

    def forgive(self, run: int) -> bool:
        """Whether a failed run may be sent again: it has changed no value, and no later command has been affected."""
        with self._lock:
            return self._pool.forgive(run)

    @property
    def living(self) -> int:
        """Number of buffers that are referenced."""
        return self._buffers.living

    # Deferred forwards.

    def promise(self, promise: DeferredForward) -> None:
        """Register a pending forward, after running the one that was pending before."""
        with self._lock:
            self._pool.check()
            self._deferral.defer(promise)

    def keep(self, reader: ForwardReader) -> None:
        """Register a reader: while it exists, it gets a copy of each buffer that it reads before a write to it."""
        with self._lock:
            self._deferral.add_reader(reader)

    @property
    def pending(self) -> DeferredForward | None:
        """The pending forward, if there is one."""
        return self._deferral.pending

    # All workers.

    def synchronize(self) -> None:
        """Wait until all earlier commands have run. Raises WorkerError."""
        with self._lock:
            self._pool.check()
            self._deferral.force_pending()
            self._buffers.ask_all(Synchronize(self._lines.here()))

    def stats(self, *, forget_peak: bool = False) -> Statistics:
        """Memory and timings of the workers after all earlier commands; `forget_peak` then resets their peaks."""
        with self._lock:
            answers = self._buffers.ask_all(ReadStatistics(self._lines.here(), forget_peak))
            return statistics(answers, self._pool.messages, self._pool.commands, self._pool.bytes)

    def trace(self, *, on: bool) -> dict[int, list[TraceSpan]]:
        """The spans per worker since the last call, empty unless tracing was on; `on` turns tracing on or off."""
        with self._lock:
            spans: dict[int, list[TraceSpan]] = {rank: [] for rank in range(self._pool.size)}
            is_complete = False
            while not is_complete:
                answers = self._buffers.ask_all(Trace(self._lines.here(), on))
                for rank, answer in answers.items():
                    spans[rank] += decoded(answer)
                is_complete = all(len(answer) < ANSWERED_SPANS for answer in answers.values())
            return spans

    def contents(self) -> dict[int, list[Any]]:
        """The buffers of each worker as [id, dtype, shape, digest], in order of id: a replay must reproduce them."""
        with self._lock:
            return self._buffers.ask_all(List(self._lines.here()))

    def log(self) -> Log:
        """All commands sent until now. Raises ValueError unless the accelerator records them."""
        if self._recorder is None:
            raise ValueError("this accelerator does not record what it sends")
        with self._lock:
            self._buffers.flush()
            return self._recorder.log()

    def send(self, commands: Sequence[Any], blocks: Sequence[Sequence[bytes | None]]) -> None:
        """Send the commands of a log entry unchanged, with the blocks of each worker, to replay it."""
        rows = [[None if block is None else _bytes(block) for block in row] for row in blocks]
        with self._lock:
            self._pool.send(commands, rows)

    def welcome(self, greeted: Callable[[int, int], None]) -> None:
        """Wait until all workers are ready or one has failed; call `greeted` with the rank and pid of each ready one.

        The thread that receives the message calls `greeted`: this one, or one that waits for an answer.
        """
        self._pool.welcome = greeted
        while not self._pool.is_complete:
            try:
                self._pool.wait_for_greeting(GREETING_SECONDS)
                with self._lock:
                    self._pool.receive()
            except (OSError, ValueError, WorkerError):
                # The workers have ended or are being ended; the next call of the user raises the reason.
                return

    def while_waiting(self, say: Callable[[Sequence[int]], None]) -> None:
        """Call `say` every second of a wait for an answer, with the code of each worker's current command."""
        self._pool.waiting = say

    def explain_shortage(self, advice: Callable[[Shortage], str]) -> None:
        """Set the function whose text, the plan and the remedies, ends the message of an out-of-memory error."""
        self._pool.advice = advice

    @property
    def status_descriptor(self) -> int:
        """The descriptor of the shared memory that begins with the workers' status lines."""
        return self._pool.status_descriptor

    def close(self) -> None:
        """End the workers; every later call raises. Warn of an error that has not been raised."""
        with self._lock:
            if (failure := self._pool.unraised) and not self._pool.closed:
                message = f"an op failed and no value that depends on it was read: {failure}"
                warnings.warn(message, LateWarning, stacklevel=1)
            self._pool.close()

    def abandon(self) -> None:
        """Release the workers in a forked child: they belong to the parent."""
        self._lock = threading.RLock()
        self._pool.abandon()

    def _activity(self, code: int, subject: int, step: int) -> str:
        """The name of a command in progress, for a worker that has ended and cannot name it itself."""
        command = kind_of(code)
        if command is None:
            return "starting"
        if command is Operate:
            return self._eager.name(subject)
        if command is Run:
            return f"{describe(self._programs.main(subject), step)} of program {subject}"
        return f"compiling program {subject}" if command is Load else name_of(command)


def _bytes(block: bytes) -> Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
