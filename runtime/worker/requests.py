"""Requests: commands that a worker answers and that change none of its buffers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.protocol.commands import (
    Fetch,
    List,
    ListWithheld,
    ReadStatistics,
    Request,
    Store,
    Synchronize,
    Trace,
)
from moaic.runtime.protocol.operation import ViewGeometry
from moaic.runtime.protocol.wire import as_block, memory
from moaic.runtime.worker import checkpoint_io
from moaic.runtime.worker.eager_op import view
from moaic.runtime.worker.failed_commands import FailedCommands, Poisoned
from moaic.runtime.worker.program import Program
from moaic.runtime.worker.tracer import Tracer


class Answer(NamedTuple):
    """Plain data and, for a tensor, its bytes."""

    data: Any
    block: Tensor | None = None


class Requests:
    """Answers requests about the buffers and programs of one worker."""

    def __init__(
        self,
        context: WorkerContext,
        table: dict[int, Tensor],
        programs: Mapping[int, Program],
        failures: FailedCommands,
        tracer: Tracer,
    ) -> None:
        self._context: Final = context
        self._table: Final = table
        self._programs: Final = programs
        self._failures: Final = failures
        self._tracer: Final = tracer
        self.handlers: Final[Mapping[type[Request], Callable[[Any], Answer | None]]] = {
            Fetch: self._fetch,
            Synchronize: self._synchronize,
            ReadStatistics: self._read_statistics,
            List: self._list,
            Store: self._store,
            Trace: self._take_trace,
            ListWithheld: self._list_withheld,
        }

    def answer(self, request: Request) -> Answer | None:
        """The answer; None if only other workers answer. Raises Poisoned for a poisoned value."""
        return self.handlers[type(request)](request)

    def _fetch(self, request: Fetch) -> Answer | None:
        if self._context.rank not in request.ranks:
            return None
        self._failures.check((request.buffer,))
        tensor = self._viewed(request.buffer, request.geometry)
        return Answer([DTYPE_NAMES[tensor.dtype], list(tensor.shape)], as_block(tensor.resolve_conj().resolve_neg()))

    def _viewed(self, buffer: int, geometry: Sequence[Any] | None) -> Tensor:
        if geometry is None:
            return self._table[buffer]
        base, shape, strides, offset, dtype = geometry
        return view(self._table, buffer, ViewGeometry(tuple(base), tuple(shape), tuple(strides), offset, dtype))

    def _store(self, request: Store) -> Answer:
        rank = self._context.rank
        boxes = request.boxes[rank]
        self._failures.check(box[0] for box in boxes)
        return Answer(checkpoint_io.write(request.paths[rank], boxes, self._table))

    def _synchronize(self, request: Synchronize) -> Answer:
        self._context.backend.synchronize()
        if self._failures.first is not None:
            raise Poisoned(self._failures.first)
        return Answer(None)

    def _read_statistics(self, request: ReadStatistics) -> Answer:
        backend = self._context.backend
        records = {number: program.record.encoded() for number, program in self._programs.items() if program.takes_part}
        report = {
            "pid": os.getpid(),
            "pss": backend.resident_bytes(),
            "buffers": len(self._table),
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in self._table.values()),
            "programs": records,
            "peak": backend.peak(),
            "launches": dict(backend.launches()),
        }
        if request.forget_peak:
            backend.forget_peak()
        return Answer(report)

    def _list(self, request: List) -> Answer:
        return Answer(
            [
                [buffer, DTYPE_NAMES[tensor.dtype], list(tensor.shape), _digest(tensor)]
                for buffer, tensor in sorted(self._table.items())
            ]
        )

    def _take_trace(self, request: Trace) -> Answer:
        return Answer(self._tracer.take(on=request.on))

    def _list_withheld(self, request: ListWithheld) -> Answer:
        return Answer(self._failures.report())


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(memory(as_block(tensor))).hexdigest()
