"""The virtual accelerator as the controller sees it: buffers, eager ops and programs, asynchronous and in order.

Commands are queued and sent together; nothing waits but `download` and `synchronize`, and every failure of a worker is
raised at the next touch after it is known.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.layout import Layout, Mesh
from moaic.ir.parser import parse
from moaic.runtime.controller.buffer import Buffer, View, row_major, storage_geometry, whole
from moaic.runtime.controller.command_log import CommandRecorder, Log
from moaic.runtime.controller.deferred_forward import DeferredForward
from moaic.runtime.controller.eager_call import EagerCall, take_apart
from moaic.runtime.controller.eager_placement import births, decide, geometry_of, operands, serves
from moaic.runtime.controller.errors import LateWarning, WorkerError
from moaic.runtime.controller.launch import LocalWorkers
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.boxes import Box, FileSource, Shard, boxes, parts
from moaic.runtime.protocol.commands import Code
from moaic.runtime.protocol.conversion import Resharding
from moaic.runtime.protocol.instruction_name import describe
from moaic.runtime.protocol.operation import Operation, read_as
from moaic.runtime.protocol.placement import Placement, alike, owners, spread
from moaic.runtime.protocol.shortage import Shortage
from moaic.runtime.protocol.span import TraceSpan, decoded
from moaic.runtime.protocol.statistics import Statistics, statistics
from moaic.runtime.protocol.tensor_parts import assemble, local_part
from moaic.runtime.protocol.wire import as_block

MOST_PREPARED: Final = 10_000
"""Eager ops that are remembered at a time."""

GREETING_SECONDS: Final = 0.5
"""How long nobody looks whether the workers are still awaited."""

_NOWHERE: Final = id(None)
"""The `id` of the placement of a buffer that is on no worker."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A program as the controller remembers it."""

    main: Function
    mesh: Mesh
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    has_key: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """An eager op, decided on and defined on the workers."""

    number: int
    outputs: tuple[Placement, ...]
    moved: tuple[tuple[int, int], ...]
    """Operands that must be brought elsewhere first, and the number of the conversion."""
    returned: tuple[tuple[int, int], ...]
    """Operands whose new value must be brought back to where its buffer rests, and the number of the conversion."""
    places: tuple[Placement | None, ...]
    """The operands' placements, kept so that none that the key names by its identity is ever another."""


class ForwardReader(Protocol):
    """Who may still read buffers that the person is free to overwrite: a forward whose backward has not come."""

    @property
    def is_live(self) -> bool:
        """Whether any reading can still come; asked from any thread."""
        ...

    def reads(self, buffer: Buffer) -> bool: ...

    def replace(self, buffer: Buffer, copy: Buffer) -> None:
        """Read `copy` instead of `buffer` from now on."""
        ...


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
        self._places: dict[Placement, Placement] = {}
        self._dead: deque[int] = deque()
        self._last_id = 0
        self._prepared: dict[Any, Prepared] = {}
        self._operations: dict[Operation, int] = {}
        self._paths: dict[Resharding, int] = {}
        self._programs: list[Loaded] = []
        self._pending: DeferredForward | None = None
        self._keepers: list[ForwardReader] = []

    @property
    def flavor(self) -> int:
        """Number of workers."""
        return self._pool.size

    def buffer(self, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Buffer:
        """A buffer without a value. Without strides it is row-major."""
        sizes = tuple(shape)
        geometry = storage_geometry(dtype, sizes, row_major(sizes) if strides is None else tuple(strides))
        with self._lock:
            self._last_id += 1
            return Buffer(self._last_id, geometry, self._dead.append)

    def upload(self, buffer: Buffer, tensor: Tensor, *, is_kept: bool = False) -> None:
        """Gives the whole buffer the value of a tensor of its shape.

        A copy is made at once, unless the tensor `is_kept` as it is by the caller.
        """
        if tuple(tensor.shape) != buffer.shape:
            raise ValueError(f"{buffer} cannot take a tensor of shape {list(tensor.shape)}")
        copy = tensor.detach().to(device="cpu", dtype=DTYPES[buffer.dtype], copy=not is_kept)
        with self._lock:
            self._about_to_write(buffer)
            buffer.host, buffer.fill = copy, None
            if buffer.place is not None:
                self._send_value(buffer, buffer.place)

    def fill(self, buffer: Buffer, value: float | bool) -> None:
        """Gives every element of the buffer one value."""
        with self._lock:
            self._about_to_write(buffer)
            buffer.host, buffer.fill = None, value
            if buffer.place is not None:
                self._send_value(buffer, buffer.place)

    def download(self, view: View) -> Tensor:
        """The value of a tensor of the device, row-major, once all before it has been done. Raises WorkerError."""
        with self._lock:
            self._pool.check()
            buffer = view.buffer
            self._force(buffer)
            if buffer.place is None:
                return _on_host(view)
            place = buffer.place
            if place.layout.partial:
                place = place.whole()
                buffer = self._moved(buffer, place)
            return self._fetched(view, buffer, place)

    def parts(self, buffer: Buffer) -> tuple[Shard, ...]:
        """The parts in which the workers hold a value; none while it waits on the host, or is not made of parts."""
        with self._lock:
            self._pool.check()
            self._force(buffer)
            place = buffer.place
            return () if place is None or place.layout.partial else parts(buffer.shape, place)

    def store(
        self, paths: Sequence[str], items: Sequence[Sequence[tuple[Buffer, Box]]]
    ) -> dict[int, list[tuple[int, int]]]:
        """Each worker writes boxes that it holds to a file of its own; per worker where each box begins, its length."""
        rows = [[(buffer.id, box.local, box.sizes) for buffer, box in row] for row in items]
        ranks = [rank for rank, row in enumerate(rows) if row]
        with self._lock:
            return self._pool.ask(Code.STORE, self._lines.here(), [paths, rows], ranks)

    def restore(self, buffer: Buffer, sources: Sequence[FileSource]) -> None:
        """Gives the buffer a value from files, of which each worker reads its part; one that lies nowhere is spread."""
        with self._lock:
            self._about_to_write(buffer)
            place = buffer.place
            if place is None or place.layout.partial:
                place = self._same(spread(buffer.shape, self.flavor))
            held = [boxes(buffer.shape, place, rank) if rank in place.holders else None for rank in range(self.flavor)]
            shape = place.layout.local_shape(buffer.shape, place.mesh)
            self._pool.push([Code.RESTORE, self._lines.here(), buffer.id, buffer.dtype, shape, held, sources])
            buffer.place, buffer.host, buffer.fill = place, None, None

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
            if self._pending is not None and self._deferred(call, outputs):
                return
            self._launch(call, outputs)

    def load(self, text: str, *, compiled: bool = True, recorded: bool = False, module: Module | None = None) -> int:
        """Sends a program to the workers, which begin to compile it; its number, for `run`. Raises Diagnostic.

        With `recorded` they repeat runs by recordings where their devices can. `module` is what the text says, where
        the caller has it at hand.
        """
        module = parse(text) if module is None else module
        main, mesh = module.main, module.mesh
        if mesh.ranks > self.flavor:
            raise Diagnostic(
                f"the program is for {mesh.ranks} workers, and there are {self.flavor}",
                hint="set MOAI_FLAVOR, or call torch.moai.set_flavor before the first use of the device",
            )
        keys = [index for index in range(len(main.params)) if main.param_role(index).kind == "key"]
        inputs = [param.type.layout for index, param in enumerate(main.params) if index not in keys]
        with self._lock:
            self._pool.check()
            loaded = Loaded(
                main,
                mesh,
                tuple(self._place(mesh, layout) for layout in inputs),
                tuple(self._place(mesh, result.type.layout) for result in main.results),
                bool(keys),
            )
            self._programs.append(loaded)
            number = len(self._programs) - 1
            self._pool.push([Code.LOAD, self._lines.here(), number, text, compiled, recorded, mesh.ranks])
            self._pool.flush()
            return number

    def program(self, number: int) -> Function:
        """The main function of a program that was loaded."""
        return self._programs[number].main

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

        `inputs` are the main function's parameters but its random key, `outputs` its results; None is one that nobody
        wants. What lies otherwise than a parameter's type says is brought there for this run, buffers in `rest` for
        good. `fulfils` is a promise whose values this run makes: its `fulfilled` is then to be called.
        """
        with self._lock:
            self._pool.check()
            loaded = self._programs[program]
            _check_arity(loaded, program, inputs, outputs, key)
            self._clear_the_way(inputs, outputs, fulfils)
            # What nobody holds any more makes room for this run, which may lend its gradients the same memory.
            self._bury()
            temporary: list[Buffer] = []
            ids = [self._input(*each, rest, temporary) for each in zip(inputs, loaded.inputs, strict=True)]
            names = [None if buffer is None else buffer.id for buffer in outputs]
            self._pool.push([Code.RUN, self._lines.here(), program, ids, names, key])
            for buffer, place in zip(outputs, loaded.outputs, strict=True):
                if buffer is not None:
                    buffer.place, buffer.host, buffer.fill = place, None, None
            del temporary
            self._flush()

    def promise(self, promise: DeferredForward) -> None:
        """Registers a pending forward; one that is still pending is run first."""
        with self._lock:
            self._pool.check()
            if self._pending is not None:
                self._pending.force()
            self._pending = promise
            promise.register(self._withdraw)

    def keep(self, keeper: ForwardReader) -> None:
        """From now on `keeper` is given a copy of what it reads before that is overwritten."""
        with self._lock:
            self._live_keepers().append(keeper)

    @property
    def pending(self) -> DeferredForward | None:
        """The pending forward, if there is one."""
        return self._pending

    def synchronize(self) -> None:
        """Waits until all that was asked for has been done. Raises WorkerError."""
        with self._lock:
            self._pool.check()
            if self._pending is not None:
                self._pending.force()
            self._bury()
            self._ask_all(Code.SYNCHRONIZE)

    def stats(self, *, forget_peak: bool = False) -> Statistics:
        """Memory and timings of the workers, once they have done all that was asked for; peaks count from then on."""
        with self._lock:
            self._bury()
            answers = self._ask_all(Code.REPORT, forget_peak)
            return statistics(answers, self._pool.messages, self._pool.commands)

    def trace(self, *, on: bool) -> dict[int, list[TraceSpan]]:
        """Per worker what it did since this was last asked, if it noted that; from now on it does, or not."""
        with self._lock:
            self._bury()
            answers = self._ask_all(Code.TRACE, on)
            return {rank: decoded(answers[rank]) for rank in sorted(answers)}

    def contents(self) -> dict[int, list[Any]]:
        """Per worker its buffers as [id, dtype, shape, digest], in order of id: what a replay must bring about."""
        with self._lock:
            self._bury()
            return self._ask_all(Code.LIST)

    def log(self) -> Log:
        """All that was sent until now, if it is recorded."""
        if self._recorder is None:
            raise ValueError("this accelerator does not record what it sends")
        with self._lock:
            self._flush()
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

    # Buffers and where they lie.

    def _place(self, mesh: Mesh, layout: Layout) -> Placement:
        return self._same(Placement(mesh, layout))

    def _same(self, place: Placement) -> Placement:
        """The one object for all equal placements."""
        return self._places.setdefault(place, place)

    def _settle(self, buffer: Buffer, place: Placement) -> None:
        """Brings a buffer that lies nowhere yet to the workers."""
        buffer.place = self._same(place)
        self._send_value(buffer, buffer.place)

    def _send_value(self, buffer: Buffer, place: Placement) -> None:
        shape = list(place.layout.local_shape(buffer.shape, place.mesh))
        line = self._lines.here()
        if buffer.host is None:
            self._pool.push([Code.FILL, line, buffer.id, buffer.dtype, shape, place.holders, buffer.fill])
        else:
            self._pool.put([Code.PUT, line, buffer.id, buffer.dtype, shape], self._parts(buffer.host, place))
        buffer.host, buffer.fill = None, None

    def _parts(self, host: Tensor, place: Placement) -> list[Tensor | None]:
        """Per worker the bytes of its part; workers with equal parts get the same memory."""
        parts: list[Tensor | None] = [None] * self.flavor
        whole = as_block(host) if place.is_uncut else None
        for rank in place.holders:
            parts[rank] = as_block(local_part(host, place.mesh, place.layout, rank)) if whole is None else whole
        return parts

    def _moved(self, buffer: Buffer, place: Placement) -> Buffer:
        """A temporary copy of a buffer that lies as `place` says."""
        copy = self.buffer(buffer.dtype, buffer.shape, buffer.strides)
        self._push_move(buffer, copy.id, place)
        copy.place = self._same(place)
        return copy

    def _push_move(self, buffer: Buffer, target: int, place: Placement) -> None:
        assert buffer.place is not None
        path = self._path(Resharding(buffer.dtype, buffer.shape, buffer.place, place))
        self._pool.push([Code.MOVE, self._lines.here(), path, buffer.id, target])

    def _path(self, conversion: Resharding) -> int:
        """The number of a conversion, which the workers know from now on."""
        number = self._paths.get(conversion)
        if number is None:
            number = self._paths[conversion] = len(self._paths)
            self._pool.push([Code.PATH, self._lines.here(), number, conversion.encoded()])
        return number

    def _fetched(self, view: View, buffer: Buffer, place: Placement) -> Tensor:
        line = self._lines.here()
        self._bury()
        if place.is_uncut:
            first = place.holders[0]
            return self._pool.ask(Code.FETCH, line, [buffer.id, geometry_of(view), [first]], [first])[first]
        ranks = owners(place)
        parts = self._pool.ask(Code.FETCH, line, [buffer.id, None, ranks], ranks)
        value = assemble(lambda rank: parts[rank], place.mesh, place.layout)
        return value if view.is_whole else _seen(value, view)

    def _bury(self) -> None:
        """Queues the end of buffers that nobody holds any more."""
        if self._dead:
            ids = [self._dead.popleft() for _ in range(len(self._dead))]
            self._pool.push([Code.FREE, -1, ids])

    def _flush(self) -> None:
        self._bury()
        self._pool.flush()

    def _ask_all(self, code: Code, *arguments: Any) -> dict[int, Any]:
        return self._pool.ask(code, self._lines.here(), arguments, range(self.flavor))

    # Promises.

    def _withdraw(self) -> None:
        self._pending = None

    def _force(self, buffer: Buffer) -> None:
        if buffer.promise is not None:
            buffer.promise.force()

    def _about_to_write(self, buffer: Buffer) -> None:
        """Runs the pending forward if it would miss, or overwrite, what `buffer` is about to be given."""
        self._pool.check()
        pending = self._pending
        if pending is not None and not pending.running and (pending.reads(buffer) or pending.makes(buffer)):
            pending.force()
        self._save_kept([buffer])

    def _live_keepers(self) -> list[ForwardReader]:
        self._keepers = [each for each in self._keepers if each.is_live]
        return self._keepers

    def _save_kept(self, written: Iterable[Buffer]) -> None:
        """Copies what is about to be overwritten for those who still read the value that it has."""
        for buffer in written if self._live_keepers() else ():
            readers = [each for each in self._keepers if each.reads(buffer)]
            if readers:
                copy = self._copied(buffer)
                for each in readers:
                    each.replace(buffer, copy)

    def _copied(self, buffer: Buffer) -> Buffer:
        copy = self.buffer(buffer.dtype, buffer.shape, buffer.strides)
        if buffer.place is None:
            copy.host, copy.fill = buffer.host, buffer.fill
        else:
            self._launch(take_apart("aten.clone", (whole(buffer),), {}, (copy.geometry,)), (copy,))
        return copy

    def _clear_the_way(
        self, inputs: Iterable[Buffer], outputs: Iterable[Buffer | None], fulfils: DeferredForward | None
    ) -> None:
        """Forces the pending forward if a run needs its values or would overwrite what it still reads."""
        pending = self._pending
        if pending is None or fulfils is pending:
            # What is deferred behind the pending forward will overwrite some of its inputs, but has not yet.
            return
        written = [buffer for buffer in outputs if buffer is not None]
        if any(buffer.promise is not None for buffer in inputs):
            pending.force()
        elif pending.running or any(pending.makes(buffer) for buffer in written):
            return
        elif any(pending.reads(buffer) for buffer in written):
            pending.force()

    def _deferred(self, call: EagerCall, outputs: Sequence[Buffer]) -> bool:
        """Defers an op that reads what is promised; forces the promise if the op would overwrite what it needs."""
        pending = self._pending
        assert pending is not None
        if pending.running:
            return False
        changed = (*call.written(), *outputs)
        if any(buffer.promise is not None for buffer in call.buffers):
            pending.defer(lambda: self._launch(call, outputs), call.buffers, changed)
            return True
        if any(pending.reads(buffer) for buffer in changed):
            pending.force()
        return False

    # Eager ops.

    def _launch(self, call: EagerCall, outputs: Sequence[Buffer]) -> None:
        if self._keepers and self._live_keepers():
            self._save_kept(call.written())
        places = [id(buffer.place) for buffer in call.buffers]
        if _NOWHERE in places:
            self._settle_all(call)
            places = [id(buffer.place) for buffer in call.buffers]
        key = (call.form, *places, *call.offsets)
        prepared = self._prepared.get(key)
        if prepared is None:
            self._make_room()
            prepared = self._prepared[key] = self._prepare(call)
        ids = [buffer.id for buffer in call.buffers]
        line = self._lines.here()
        temporary = self._gather(ids, prepared, line)
        self._pool.push([Code.OPERATE, line, prepared.number, ids, call.scalars, [buffer.id for buffer in outputs]])
        for index, path in prepared.returned:
            self._pool.push([Code.MOVE, line, path, ids[index], call.buffers[index].id])
        if temporary:
            self._pool.push([Code.FREE, line, temporary])
        for buffer, place in zip(outputs, prepared.outputs, strict=False):
            buffer.place, buffer.host, buffer.fill = place, None, None

    def _make_room(self) -> None:
        """Forgets all eager ops once there are too many: a loop over slices makes a new one at each step."""
        if len(self._prepared) >= MOST_PREPARED:
            self._prepared.clear()
            self._operations.clear()
            self._pool.push([Code.FORGET, -1])

    def _gather(self, ids: list[int], prepared: Prepared, line: int) -> list[int]:
        """Puts operands that lie elsewhere into temporary buffers, one per buffer and conversion; their ids."""
        temporary: dict[tuple[int, int], int] = {}
        for index, path in prepared.moved:
            source = ids[index]
            target = temporary.get((source, path))
            if target is None:
                self._last_id += 1
                target = temporary[source, path] = self._last_id
                self._pool.push([Code.MOVE, line, path, source, target])
            ids[index] = target
        return list(temporary.values())

    def _settle_all(self, call: EagerCall) -> None:
        """Brings the operands that lie nowhere yet to where the op would have them."""
        places = births(call.form.op, operands(call), self.flavor)
        for buffer, place in zip(call.buffers, places, strict=True):
            if place is not None and buffer.place is None:
                self._settle(buffer, place)

    def _prepare(self, call: EagerCall) -> Prepared:
        form, given = call.form, operands(call)
        decision = decide(form, given, self.flavor)
        moved: list[tuple[int, int]] = []
        returned: list[tuple[int, int]] = []
        for index, (each, needed) in enumerate(zip(given, decision.required, strict=True)):
            assert each.place is not None
            if not serves(each.place, needed):
                moved.append((index, self._path(Resharding(each.dtype, each.buffer_shape, each.place, needed))))
            elif not each.written or set(needed.holders) == set(each.place.holders):
                continue
            if each.written:
                returned.append((index, self._path(Resharding(each.dtype, each.buffer_shape, needed, each.place))))
        geometries = tuple(each.geometry for each in given)
        combination = decision.combination
        ranks = tuple(place.holders for place in decision.required) if combination is None else combination.owners
        kwargs = (*form.kwargs, *decision.kwargs)
        number = self._defined(Operation(form.op, form.args, kwargs, geometries, ranks, combination))
        outputs_places = tuple(self._same(place) for place in decision.outputs)
        return Prepared(number, outputs_places, tuple(moved), tuple(returned), tuple(each.place for each in given))

    def _defined(self, operation: Operation) -> int:
        number = self._operations.get(operation)
        if number is None:
            number = self._operations[operation] = len(self._operations)
            self._pool.push([Code.DEFINE, self._lines.here(), number, operation.encoded()])
        return number

    # Programs.

    def _input(self, buffer: Buffer, place: Placement, rest: Collection[Buffer], temporary: list[Buffer]) -> int:
        """The id under which `buffer` lies as `place` says."""
        if buffer.place is place:
            return buffer.id
        if buffer.place is None:
            self._settle(buffer, place)
        elif not alike(buffer.place, place):
            if buffer not in rest:
                temporary.append(self._moved(buffer, place))
                return temporary[-1].id
            self._push_move(buffer, buffer.id, place)
            buffer.place = place
        return buffer.id

    def _activity(self, code: int, subject: int, step: int) -> str:
        """Names what a worker does, for one that cannot tell any more."""
        if code == Code.OPERATE:
            return next((each.op for each, number in self._operations.items() if number == subject), "an op")
        if code == Code.RUN:
            return f"{describe(self._programs[subject].main, step)} of program {subject}"
        if code == Code.LOAD:
            return f"compiling program {subject}"
        return "starting" if code < 0 else Code(code).name.lower()


def _bytes(block: bytes) -> Tensor:
    return torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)


def _check_arity(
    loaded: Loaded, program: int, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], key: object
) -> None:
    if len(inputs) != len(loaded.inputs) or len(outputs) != len(loaded.outputs):
        raise ValueError(
            f"program {program} has {len(loaded.inputs)} inputs and {len(loaded.outputs)} outputs, "
            f"not {len(inputs)} and {len(outputs)}"
        )
    if loaded.has_key and key is None:
        raise ValueError(f"program {program} needs a random key")


def _seen(value: Tensor, view: View) -> Tensor:
    """A view into a buffer whose value is at hand."""
    base = torch.empty_strided(view.buffer.shape, view.buffer.strides, dtype=value.dtype).copy_(value)
    return read_as(base, view.dtype, view.shape, view.strides, view.offset).contiguous()


def _on_host(view: View) -> Tensor:
    """The value of a buffer that has not been sent yet."""
    buffer = view.buffer
    host = buffer.host
    if host is None:
        host = torch.full(buffer.shape, 0 if buffer.fill is None else buffer.fill, dtype=DTYPES[buffer.dtype])
    return _seen(host, view).clone()
