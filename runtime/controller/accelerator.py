"""The virtual accelerator as the controller sees it: buffers, eager ops and programs, asynchronous and in order.

Commands are queued and sent together; nothing waits but `download` and `synchronize`, and every failure of a worker is
raised at the next touch after it is known.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
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
from moaic.runtime.controller.launch import LocalWorkers
from moaic.runtime.controller.programs import Programs
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.boxes import Box, FileSource, Shard, boxes, parts
from moaic.runtime.protocol.commands import (
    List,
    Load,
    Operate,
    Report,
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
from moaic.runtime.protocol.span import TraceSpan, decoded
from moaic.runtime.protocol.statistics import Statistics, statistics

GREETING_SECONDS: Final = 0.5
"""How long nobody looks whether the workers are still awaited."""


class Accelerator:
    """All workers as one device. Safe to call from several threads."""

    def __init__(self, workers: LocalWorkers, *, record: bool = False) -> None:
        """`record` keeps everything that is sent, for `log`."""
        self._lock = threading.RLock()
        self._lines = SourceLines()
        self._pool = WorkerPool(workers, self._lines, self._activity)
        self._recorder = CommandRecorder(self._pool.size) if record else None
        if self._recorder is not None:
            self._pool.record(self._recorder)
        self._buffers = Buffers(self._pool, self._lines)
        self._programs = Programs(self._buffers)
        self._eager = EagerOps(self._buffers)
        self._deferral = Deferral(self._buffers, self._eager)

    @property
    def flavor(self) -> int:
        """Number of workers."""
        return self._pool.size

    # Buffers.

    def buffer(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Buffer:
        """A buffer without a value. Without strides it is row-major."""
        with self._lock:
            return self._buffers.make(dtype, shape, strides)

    def upload(self, buffer: Buffer, tensor: Tensor, *, is_kept: bool = False) -> None:
        """Gives the whole buffer the value of a tensor of its shape.

        A copy is made at once, unless the tensor `is_kept` as it is by the caller.
        """
        if tuple(tensor.shape) != buffer.shape:
            raise ValueError(f"{buffer} cannot take a tensor of shape {list(tensor.shape)}")
        copy = tensor.detach().to(device="cpu", dtype=DTYPES[buffer.dtype], copy=not is_kept)
        self._give(buffer, copy, None)

    def fill(self, buffer: Buffer, value: float | bool) -> None:
        """Gives every element of the buffer one value."""
        self._give(buffer, None, value)

    def _give(self, buffer: Buffer, host: Tensor | None, fill: float | bool | None) -> None:
        with self._lock:
            self._pool.check()
            self._deferral.about_to_write(buffer)
            buffer.host, buffer.fill = host, fill
            if buffer.place is not None:
                self._buffers.send_value(buffer, buffer.place)

    def download(self, view: View) -> Tensor:
        """The value of a tensor of the device, row-major, once all before it has been done. Raises WorkerError."""
        with self._lock:
            self._pool.check()
            self._deferral.force(view.buffer)
            return self._buffers.fetch(view)

    def parts(self, buffer: Buffer) -> tuple[Shard, ...]:
        """The parts in which the workers hold a value; none while it waits on the host, or is not made of parts."""
        with self._lock:
            self._pool.check()
            self._deferral.force(buffer)
            place = buffer.place
            return () if place is None or place.layout.partial else parts(buffer.shape, place)

    def store(
        self, paths: Sequence[str], items: Sequence[Sequence[tuple[Buffer, Box]]]
    ) -> dict[int, list[tuple[int, int]]]:
        """Each worker writes boxes that it holds to a file of its own; per worker where each box begins, its length."""
        rows = [[(buffer.id, box.local, box.sizes) for buffer, box in row] for row in items]
        ranks = [rank for rank, row in enumerate(rows) if row]
        with self._lock:
            return self._pool.ask(Store(self._lines.here(), paths, rows), ranks)

    def restore(self, buffer: Buffer, sources: Sequence[FileSource]) -> None:
        """Gives the buffer a value from files, of which each worker reads its part; one that lies nowhere is spread."""
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
        """Queues an eager aten op.

        Tensors among the arguments are views; 0-dim CPU tensors go by value. `outputs` take the results of a functional
        op; what an op writes in place or by `out=` is read off its schema. Raises TypeError for what cannot be sent.
        """
        self.launch_call(take_apart(op, args, kwargs, [buffer.geometry for buffer in outputs]), outputs)

    def launch_call(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        """`launch` for arguments that have been taken apart."""
        with self._lock:
            self._pool.check()
            self._deferral.launch(call, outputs)

    def load(self, text: str, *, compiled: bool = True, recorded: bool = False, module: Module | None = None) -> int:
        """Sends a program to the workers, which begin to compile it; its number, for `run`. Raises Diagnostic.

        With `recorded` they repeat runs by recordings where their devices can. `module` is what the text says, where
        the caller has it at hand.
        """
        module = parse(text) if module is None else module
        with self._lock:
            self._pool.check()
            return self._programs.load(text, module, compiled=compiled, recorded=recorded)

    def program(self, number: int) -> Function:
        """The main function of a program that was loaded."""
        return self._programs.main(number)

    def run(
        self,
        program: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer | None],
        key: tuple[int, int] | None = None,
        *,
        rest: Collection[Buffer] = (),
        fulfils: DeferredForward | None = None,
    ) -> None:
        """Queues a program and sends all that is queued.

        `inputs` are the main function's parameters but its random key, `outputs` its results; None is one that is not
        wanted. What lies otherwise than a parameter's type says is brought there for this run, buffers in `rest` for
        good. `fulfils` is the deferred forward whose values this run makes: its `fulfilled` is then to be called.
        """
        with self._lock:
            self._pool.check()
            self._programs.check(program, inputs, outputs, key)
            self._deferral.clear_the_way(inputs, outputs, fulfils)
            self._programs.run(program, inputs, outputs, key, rest)

    # Deferred forwards.

    def promise(self, promise: DeferredForward) -> None:
        """Registers a pending forward; one that is still pending is run first."""
        with self._lock:
            self._pool.check()
            self._deferral.defer(promise)

    def keep(self, keeper: ForwardReader) -> None:
        """From now on, while it exists, `keeper` is given a copy of what it reads before that is overwritten."""
        with self._lock:
            self._deferral.add_reader(keeper)

    @property
    def pending(self) -> DeferredForward | None:
        """The pending forward, if there is one."""
        return self._deferral.pending

    # All workers.

    def synchronize(self) -> None:
        """Waits until all that was asked for has been done. Raises WorkerError."""
        with self._lock:
            self._pool.check()
            self._deferral.force_pending()
            self._buffers.ask_all(Synchronize(self._lines.here()))

    def stats(self, *, forget_peak: bool = False) -> Statistics:
        """Memory and timings of the workers, once they have done all that was asked for; peaks count from then on."""
        with self._lock:
            answers = self._buffers.ask_all(Report(self._lines.here(), forget_peak))
            return statistics(answers, self._pool.messages, self._pool.commands)

    def trace(self, *, on: bool) -> dict[int, list[TraceSpan]]:
        """Per worker what it did since this was last asked, if it noted that; from now on it does, or not."""
        with self._lock:
            answers = self._buffers.ask_all(Trace(self._lines.here(), on))
            return {rank: decoded(answers[rank]) for rank in sorted(answers)}

    def contents(self) -> dict[int, list[Any]]:
        """Per worker its buffers as [id, dtype, shape, digest], in order of id: what a replay must bring about."""
        with self._lock:
            return self._buffers.ask_all(List(self._lines.here()))

    def log(self) -> Log:
        """All that was sent until now, if it is recorded."""
        if self._recorder is None:
            raise ValueError("this accelerator does not record what it sends")
        with self._lock:
            self._buffers.flush()
            return self._recorder.log()

    def send(self, commands: Sequence[Any], blocks: Sequence[Sequence[bytes | None]]) -> None:
        """Sends the commands of a log's entry, with the blocks of each worker, as they are: for replaying it."""
        rows = [[None if block is None else _bytes(block) for block in row] for row in blocks]
        with self._lock:
            self._pool.send(commands, rows)

    def welcome(self, greeted: Callable[[int, int], None]) -> None:
        """Waits until all workers are ready, or one never will be; `greeted` gets rank and process of each that is.

        It is called by whoever hears of it first, from any thread.
        """
        self._pool.welcome = greeted
        while not self._pool.is_complete:
            try:
                self._pool.wait_for_greeting(GREETING_SECONDS)
                with self._lock:
                    self._pool.receive()
            except (OSError, ValueError, WorkerError):
                # They have ended, or are being ended: whoever uses them is told why.
                return

    def while_waiting(self, say: Callable[[Sequence[int]], None]) -> None:
        """Has `say` told, now and then while an answer is awaited, which kind of command each worker is at."""
        self._pool.waiting = say

    def explain_shortage(self, ways_out: Callable[[Shortage], str]) -> None:
        """Has the error of a worker that runs out of memory say by which plan that was, and what can be done."""
        self._pool.ways_out = ways_out

    @property
    def status_descriptor(self) -> int:
        """Of the memory that begins with the workers' status lines."""
        return self._pool.status_descriptor

    def close(self) -> None:
        """Ends the workers; every later touch raises. Warns of an error that has not been raised."""
        with self._lock:
            if self._pool.untold and not self._pool.closed:
                warnings.warn(f"nobody read what failed: {self._pool.untold}", LateWarning, stacklevel=1)
            self._pool.close()

    def abandon(self) -> None:
        """In a forked child: lets go of workers that are the parent's."""
        self._lock = threading.RLock()
        self._pool.abandon()

    def _activity(self, code: int, subject: int, step: int) -> str:
        """Names what a worker does, for one that cannot tell any more."""
        kind = kind_of(code)
        if kind is None:
            return "starting"
        if kind is Operate:
            return self._eager.name(subject)
        if kind is Run:
            return f"{describe(self._programs.main(subject), step)} of program {subject}"
        return f"compiling program {subject}" if kind is Load else name_of(kind)


def _bytes(block: bytes) -> Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
