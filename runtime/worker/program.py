"""Programs on a worker: an instruction list over compiled functions, with collectives between them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moaic.ir.graph import Function, Op
from moaic.ir.parser import parse
from moaic.ir.ring_attention import is_ring
from moaic.ir.specialize import Specializer, symbols_of
from moaic.ir.symbols import Numbers, Symbols
from moaic.runtime.codegen.compile import prepare_functions
from moaic.runtime.comm.device_backend import DeviceBackend, Moment
from moaic.runtime.comm.reshard import RankContext, is_shared, own
from moaic.runtime.comm.transport import Group
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.protocol.instruction_name import describe
from moaic.runtime.worker.compile_shares import called_functions, host_shares
from moaic.runtime.worker.cuda_graph import GraphRecorder, obstacle
from moaic.runtime.worker.instructions import Compute, Instruction, instructions, is_communication
from moaic.runtime.worker.overlap_and_bucket import arranged, program_order
from moaic.runtime.worker.per_rank_order import rank_order
from moaic.runtime.worker.stream_order import MANY, check_program, check_streams

SIZES_KEPT = 64
"""Latest sizes of a program with open sizes whose instructions are kept."""


@dataclass(slots=True)
class Record:
    """The seconds that one worker has spent on a program so far."""

    compile: dict[str, float] = field(default_factory=dict[str, float])
    """Compile time by function."""
    runs: int = 0
    compute: float = 0.0
    communicate: float = 0.0
    """Time of communication, including the wait for other workers."""
    last_run: float = 0.0
    repeated: int = 0
    """Runs that were replays of a CUDA graph, whose compute and communication times are not known."""
    elapsed: float = 0.0
    """Time of the device from the begin of each run to its end, replays included."""
    _latest: deque[tuple[Moment, Moment]] = field(default_factory=deque[tuple[Moment, Moment]])
    """Begins and ends of runs that are not in `elapsed` yet."""

    def took(self, begin: Moment, end: Moment) -> None:
        """Adds the time of a run, which need not have come."""
        self._latest.append((begin, end))
        while self._latest and self._latest[0][1].has_come:
            self._count()

    def _count(self) -> None:
        begin, end = self._latest.popleft()
        self.elapsed += end.seconds_since(begin)

    def compiled(self, names: Sequence[str], seconds: float) -> None:
        """Adds the time that compiling these functions together took."""
        for name in names:
            self.compile[name] = self.compile.get(name, 0.0) + seconds / len(names)

    def encoded(self) -> dict[str, Any]:
        """For a message; waits for the device."""
        while self._latest:
            self._count()
        return {
            "compile": dict(self.compile),
            "runs": self.runs,
            "compute": self.compute,
            "communicate": self.communicate,
            "last_run": self.last_run,
            "repeated": self.repeated,
            "elapsed": self.elapsed,
        }


class Program:
    """One rank's part of a program."""

    def __init__(
        self,
        text: str,
        context: WorkerContext,
        *,
        compiled: bool,
        note: Callable[[int], None],
        graphs: GraphMode = GraphMode.NEVER,
        say: Callable[[str], None] = lambda reason: None,
        background: bool = False,
        record: Record | None = None,
    ) -> None:
        """`note` is called with the index of each instruction before it runs. Raises Diagnostic for an invalid text.

        By `graphs` runs are captured and replayed as CUDA graphs, where the device can; `say` is told why they are not.
        With `background` runs are op by op until `adopt`, and not captured before.
        """
        module = parse(text)
        self.mesh = module.mesh
        self.main = module.main
        self.takes_part = context.rank < self.mesh.ranks
        self.makes_gradients = bool(self.main.gradients)
        self.record = record or Record()
        self._note = note
        if not self.takes_part:
            return
        self._context = context
        rank_context = RankContext(self.mesh, context)
        is_arranged = context.transport.is_asynchronous
        arrange = arranged(self.main, self.mesh) if is_arranged else program_order(self.main)
        if is_arranged and context.rank == 0 and self.mesh.ranks <= MANY:
            check_program(self.main, arrange, self.mesh, context.transport.send_slots)
        at = self.mesh.coordinates(context.rank)
        steps = rank_order(arrange, self.mesh, at, context.transport.send_slots)
        self._numbers = [step.position for step in steps]
        mine = [step.op for step in steps]
        functions = called_functions(module)
        shares = host_shares(module, functions, context.local)
        symbols = symbols_of(module)
        self._instructions = _Instructions(self.main, mine, rank_context, functions, shares, symbols, self.record)
        self._at: dict[bool, Callable[[tuple[int, ...]], list[Instruction]]] = {}
        self.loaded = time.monotonic()
        self._is_compiled = compiled and not background
        self._is_compiled_at_last = compiled
        if self._is_compiled:
            self._at[True] = self._instructions.compiled(together=True)
        slots = {value: slot for slot, value in enumerate(self.main.values())}
        self._count = len(slots)
        self._results = [slots[result] for result in self.main.results]
        self._params = len(self.main.params)
        roles = [self.main.param_role(index).kind for index in range(self._params)]
        self._keys = [index for index, kind in enumerate(roles) if kind == "key"]
        self._recorder = self._new_recorder(graphs, functions.values(), say, is_open=symbols is not None)
        # Capture of a CUDA graph forbids synchronization.
        is_queued = compiled or self._recorder is not None
        self._clock = time.perf_counter if is_queued else partial(_synchronized_clock, context.backend)

    def _new_recorder(
        self, graphs: GraphMode, functions: Iterable[Function], say: Callable[[str], None], *, is_open: bool
    ) -> GraphRecorder | None:
        if graphs is GraphMode.NEVER or not self._context.backend.records:
            return None
        communicates = any(is_communication(op) or is_ring(op) for op in self.main.ops)
        if is_open:
            reason = "its sizes are open"
        elif communicates and not self._context.transport.can_be_recorded:
            reason = "its workers communicate over the host"
        elif communicates and graphs is GraphMode.ALONE:
            reason = "its GPUs communicate; cuda_graphs=True captures that, too"
        else:
            reason = obstacle(self.main, functions)
        if reason:
            say(reason)
            return None
        rank = self._context.rank
        group = Group.of(range(self.mesh.ranks) if communicates else (rank,), rank)

        def execute(operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
            return self._execute(self._made(compiled=self._is_compiled)(()), operands, wanted)

        return GraphRecorder(self.main, self._context, group, execute, say)

    def run(
        self,
        inputs: Sequence[Tensor | None],
        key: Sequence[int] | None,
        wanted: Sequence[bool],
        sizes: Sequence[int] = (),
        *,
        eager: bool = False,
        op_by_op: bool = False,
    ) -> list[Tensor | None]:
        """Run the program; return its results in order, each in its own memory, None if not wanted or not held here.

        Inputs that this rank does not hold are None. `sizes` are the numbers of the program's symbols. With `eager` the
        run is neither captured nor replayed.
        """
        operands = self._with_key(inputs, key)
        del inputs
        instructions = self._made(compiled=self._is_compiled and not op_by_op)(tuple(sizes))
        start, begin = self._clock(), self._context.backend.moment()
        is_passing = op_by_op or self._is_compiled != self._is_compiled_at_last
        if self._recorder is None or eager or is_passing:
            results = self._execute(instructions, operands, wanted)
        else:
            results = self._recorder.run(operands, wanted)
            self.record.repeated = self._recorder.repeated
        self.record.took(begin, self._context.backend.moment())
        self.record.runs += 1
        self.record.last_run = self._clock() - start
        return results

    def compile(self) -> None:
        """Compile the functions, or load from the cache on disk what others have compiled; for `adopt`."""
        if self.takes_part:
            self._made(compiled=True)

    def adopt(self) -> None:
        """Run compiled from now on."""
        self._is_compiled = True

    @property
    def functions(self) -> int:
        """Number of functions that the ranks compile."""
        return len(self._instructions.functions) if self.takes_part else 0

    def release_graph(self) -> None:
        """Release the CUDA graph and its memory."""
        if self.takes_part and self._recorder is not None:
            self._recorder.release()

    def _made(self, *, compiled: bool) -> Callable[[tuple[int, ...]], list[Instruction]]:
        """From the sizes of a run to its instructions, compiled at the first call if need be."""
        if compiled not in self._at:
            self._at[compiled] = self._instructions.compiled() if compiled else self._instructions.op_by_op()
        return self._at[compiled]

    def _execute(
        self, instructions: Sequence[Instruction], operands: Sequence[Tensor | None], wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        slots: list[Any] = [*operands, *[None] * (self._count - self._params)]
        clock = self._clock
        before = clock()
        for index, instruction in zip(self._numbers, instructions, strict=True):
            run, reads, writes, frees, awaits, communicates, _ = instruction
            self._note(index)
            for slot in awaits:
                slots[slot] = slots[slot]()
            operands = [slots[slot] for slot in reads]
            for slot in frees:
                slots[slot] = None
            results = run(operands)
            del operands
            for slot, result in zip(writes, results, strict=True):
                if slot >= 0:
                    slots[slot] = result
            del results
            now = clock()
            if communicates:
                self.record.communicate += now - before
            else:
                self.record.compute += now - before
            before = now
        self._context.transport.wait_sends()
        return self._finish(slots, wanted)

    def describe(self, index: int) -> str:
        """The name of an instruction in messages."""
        return describe(self.main, index)

    def label(self, index: int) -> tuple[str, str]:
        """The name and kind of an instruction in a trace."""
        op = self.main.ops[index]
        return op.callee if op.name == "call" else op.name, "communicate" if is_communication(op) else "compute"

    def _with_key(self, inputs: Sequence[Tensor | None], key: Sequence[int] | None) -> list[Tensor | None]:
        rest = iter(inputs)
        return [self._key(key) if index in self._keys else next(rest) for index in range(self._params)]

    def _key(self, key: Sequence[int] | None) -> Tensor:
        return self._context.backend.to_device(torch.tensor(key, dtype=torch.int64))

    def _finish(self, slots: list[Any], wanted: Sequence[bool]) -> list[Tensor | None]:
        """Take the results out of the slots; copy those that share memory or are part of a larger storage."""
        for slot in dict.fromkeys(self._results):
            if callable(slots[slot]):
                slots[slot] = slots[slot]()
        taken: list[Tensor | None] = [
            slots[slot] if want else None for slot, want in zip(self._results, wanted, strict=True)
        ]
        given = set(range(self._params))
        seen: set[int] = set()
        slots.clear()
        for index, slot in enumerate(self._results):
            tensor = taken[index]
            if tensor is not None and (slot in given or slot in seen or not _is_compact(tensor)):
                taken[index] = own(tensor)
            seen.add(slot)
        return taken


def _synchronized_clock(backend: DeviceBackend) -> float:
    """The time after all queued kernels: uncompiled programs measure kernels, which a GPU runs asynchronously."""
    backend.synchronize()
    return time.perf_counter()


def _is_compact(tensor: Tensor) -> bool:
    """Whether the tensor fills its storage and no other tensor shares it."""
    bytes_needed = tensor.numel() * tensor.element_size()
    return tensor.untyped_storage().nbytes() == bytes_needed and not is_shared(tensor)


class _Instructions:
    """The instructions of one rank, with functions that are compiled or run op by op."""

    def __init__(
        self,
        main: Function,
        mine: Sequence[Op],
        rank_context: RankContext,
        functions: Mapping[str, Function],
        shares: Mapping[int, Sequence[str]],
        symbols: Symbols | None,
        record: Record,
    ) -> None:
        self._main = main
        self._mine = replace(main, ops=tuple(mine))
        self._rank_context = rank_context
        self.functions = functions
        self._shares = shares
        self._symbols = symbols
        self._record = record

    def op_by_op(self) -> Callable[[tuple[int, ...]], list[Instruction]]:
        """From the sizes of a run to instructions that interpret their functions."""
        kernels = self._kernels()
        kernels.prepare([self.functions[name] for name in self.functions if name in self._own], compiled=False)
        return lru_cache(SIZES_KEPT)(partial(self._with, kernels))

    def compiled(self, *, together: bool = False) -> Callable[[tuple[int, ...]], list[Instruction]]:
        """From the sizes of a run to instructions that call compiled functions: compiles those that this rank calls.

        With `together` the ranks of a host do so at the same time: first each compiles its share of what they call.
        Shares are then loaded from the cache on disk, which holds each as a whole.
        """
        parts, rank, kernels = dict(self._shares), self._rank_context.rank, self._kernels()
        if together:
            if mine := parts.pop(rank):
                self._compile(kernels, mine)
            if parts:
                # A barrier that can be cancelled if compilation fails on a rank.
                self._rank_context.transport.agree(Group.of(tuple(self._shares), rank), 0)
        for part in parts.values():
            if not self._own.isdisjoint(part):
                self._compile(kernels, part)
        return lru_cache(SIZES_KEPT)(partial(self._with, kernels))

    @property
    def _coordinates(self) -> dict[str, int]:
        return self._rank_context.mesh.coordinates(self._rank_context.rank)

    @property
    def _own(self) -> set[str]:
        return {op.callee for op in self._mine.ops if op.name == "call"}

    def _kernels(self) -> _Kernels:
        return _Kernels(self._symbols, self._rank_context.context)

    def _compile(self, kernels: _Kernels, names: Sequence[str]) -> None:
        start = time.perf_counter()
        kernels.prepare([self.functions[name] for name in names], compiled=True)
        self._record.compiled(names, time.perf_counter() - start)

    def _with(self, kernels: _Kernels, sizes: tuple[int, ...]) -> list[Instruction]:
        numbers = {} if self._symbols is None else self._symbols.numbers(sizes)
        at = Specializer(numbers)
        slots = {at.value(value): slot for slot, value in enumerate(self._main.values())}
        made, mine = kernels.at(numbers), at.function(self._mine)
        found = list(instructions(mine, self._rank_context, self.functions, made, slots))
        if self._rank_context.transport.is_asynchronous:
            given, wanted = (
                [slots[value] for value in values if value.type.layout.holds(self._coordinates)]
                for values in (mine.params, mine.results)
            )
            check_streams(found, given, wanted)
        return found


class _Kernels:
    """Functions of a program that are ready to run, by name."""

    def __init__(self, symbols: Symbols | None, context: WorkerContext) -> None:
        self._symbols = symbols
        self._context = context
        self._made: dict[str, Callable[[Numbers], Compute]] = {}

    def prepare(self, functions: Sequence[Function], *, compiled: bool) -> None:
        device = self._context.compiled_for if compiled else self._context.device
        runs = prepare_functions(functions, self._symbols, compiled=compiled, device=device)
        self._made.update((function.name, run) for function, run in zip(functions, runs, strict=True))

    def at(self, numbers: Numbers) -> dict[str, Compute]:
        """The functions where the symbols have these numbers."""
        return {name: made(numbers) for name, made in self._made.items()}
