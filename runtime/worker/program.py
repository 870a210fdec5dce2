"""Programs on a worker: an instruction list over compiled functions, with collectives between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from moaic.ir.graph import Function, Op
from moaic.ir.localize import localize
from moaic.ir.parser import parse
from moaic.ir.ring_attention import is_ring
from moaic.ir.specialize import Specializer, symbols_of
from moaic.ir.symbols import Numbers, Symbols
from moaic.runtime.codegen.compile import prepare_functions
from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.comm.reshard import RankContext, is_shared, own
from moaic.runtime.comm.transport import Group
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.protocol.instruction_name import describe
from moaic.runtime.worker.cuda_graph import GraphRecorder, is_capturable
from moaic.runtime.worker.instructions import Compute, Instruction, instructions, is_communication
from moaic.runtime.worker.overlap_and_bucket import arranged, program_order
from moaic.runtime.worker.per_rank_order import rank_order

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

    def encoded(self) -> dict[str, Any]:
        return {
            "compile": self.compile,
            "runs": self.runs,
            "compute": self.compute,
            "communicate": self.communicate,
            "last_run": self.last_run,
            "repeated": self.repeated,
        }


class Program:
    """One rank's part of a program, compiled."""

    def __init__(
        self, text: str, context: WorkerContext, *, compiled: bool, note: Callable[[int], None], recorded: bool = False
    ) -> None:
        """`note` is called with the index of each instruction before it runs. Raises Diagnostic for an invalid text.

        With `recorded` runs are captured and replayed as CUDA graphs, where the device can.
        """
        module = parse(text)
        self.mesh = module.mesh
        self.main = module.main
        self.takes_part = context.rank < self.mesh.ranks
        self.makes_gradients = bool(self.main.gradients)
        self.record = Record()
        self._note = note
        # Capture of a CUDA graph forbids synchronization.
        self._clock = time.perf_counter if compiled or recorded else partial(_synchronized_clock, context.backend)
        if not self.takes_part:
            return
        self._context = context
        rank_context = RankContext(self.mesh, context)
        arrange = arranged(self.main, self.mesh) if context.transport.is_asynchronous else program_order(self.main)
        at = self.mesh.coordinates(context.rank)
        steps = rank_order(arrange, self.mesh, at, context.transport.send_slots)
        self._numbers = [step.position for step in steps]
        mine = [step.op for step in steps]
        called = {op.callee for op in self.main.ops if op.name == "call"}
        functions = {each.name: localize(each, self.mesh) for each in module.functions if each.name in called}
        own = {op.callee for op in mine if op.name == "call"}
        symbols = symbols_of(module)
        kernels = _Kernels(symbols, context.device, self.record, compiled=compiled)
        _compile_all(functions, own, rank_context, kernels, compiled=compiled)
        self._at = lru_cache(SIZES_KEPT)(_Instructions(self.main, mine, rank_context, functions, kernels, symbols))
        slots = {value: slot for slot, value in enumerate(self.main.values())}
        self._count = len(slots)
        self._results = [slots[result] for result in self.main.results]
        self._params = len(self.main.params)
        roles = [self.main.param_role(index).kind for index in range(self._params)]
        self._keys = [index for index, kind in enumerate(roles) if kind == "key"]
        self._recorder = self._new_recorder(functions.values()) if recorded and symbols is None else None

    def _new_recorder(self, functions: Iterable[Function]) -> GraphRecorder | None:
        communicates = any(is_communication(op) or is_ring(op) for op in self.main.ops)
        can_capture = self._context.transport.can_be_recorded or not communicates
        is_possible = self._context.backend.records and can_capture and is_capturable(self.main, functions)
        rank = self._context.rank
        group = Group.of(range(self.mesh.ranks) if communicates else (rank,), rank)
        return GraphRecorder(self.main, self._context, group, self._execute) if is_possible else None

    def run(
        self,
        inputs: Sequence[Tensor | None],
        key: Sequence[int] | None,
        wanted: Sequence[bool],
        sizes: Sequence[int] = (),
        *,
        eager: bool = False,
    ) -> list[Tensor | None]:
        """Run the program; return its results in order, each in its own memory, None if not wanted or not held here.

        Inputs that this rank does not hold are None. `sizes` are the numbers of the program's symbols. With `eager` the
        run is neither captured nor replayed.
        """
        operands = self._with_key(inputs, key)
        del inputs
        start = self._clock()
        if self._recorder is None or eager:
            results = self._execute(operands, wanted, sizes)
        else:
            results = self._recorder.run(operands, wanted)
            self.record.repeated = self._recorder.repeated
        self.record.runs += 1
        self.record.last_run = self._clock() - start
        return results

    def release_graph(self) -> None:
        """Release the CUDA graph and its memory."""
        if self.takes_part and self._recorder is not None:
            self._recorder.forget()

    def _execute(
        self, operands: Sequence[Tensor | None], wanted: Sequence[bool], sizes: Sequence[int] = ()
    ) -> list[Tensor | None]:
        slots: list[Any] = [*operands, *[None] * (self._count - self._params)]
        clock = self._clock
        before = clock()
        for index, instruction in zip(self._numbers, self._at(tuple(sizes)), strict=True):
            run, reads, writes, frees, awaits, communicates = instruction
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
    """The instructions of one rank, made for the sizes of a run: a callable that `lru_cache` wraps."""

    def __init__(
        self,
        main: Function,
        mine: Sequence[Op],
        rank_context: RankContext,
        functions: Mapping[str, Function],
        kernels: _Kernels,
        symbols: Symbols | None,
    ) -> None:
        self._main = main
        self._mine = replace(main, ops=tuple(mine))
        self._rank_context = rank_context
        self._functions = functions
        self._kernels = kernels
        self._symbols = symbols

    def __call__(self, sizes: tuple[int, ...]) -> list[Instruction]:
        numbers = {} if self._symbols is None else self._symbols.numbers(sizes)
        at = Specializer(numbers)
        slots = {at.value(value): slot for slot, value in enumerate(self._main.values())}
        kernels = {name: self._kernels.at(name, numbers) for name in self._kernels.names}
        return list(instructions(at.function(self._mine), self._rank_context, self._functions, kernels, slots))


class _Kernels:
    """The compiled functions of a program, by name."""

    def __init__(self, symbols: Symbols | None, device: torch.device, record: Record, *, compiled: bool) -> None:
        self._symbols = symbols
        self._device = device
        self._record = record
        self._compiled = compiled
        self._made: dict[str, Callable[[Numbers], Compute]] = {}

    @property
    def names(self) -> Iterable[str]:
        return self._made

    def compile(self, functions: Sequence[Function]) -> None:
        start = time.perf_counter()
        runs = prepare_functions(functions, self._symbols, compiled=self._compiled, device=self._device)
        self._made.update((function.name, run) for function, run in zip(functions, runs, strict=True))
        seconds = (time.perf_counter() - start) / max(1, len(functions))
        self._record.compile |= {function.name: seconds for function in functions}

    def at(self, name: str, numbers: Numbers) -> Compute:
        """The function where the symbols have these numbers."""
        return self._made[name](numbers)


def _compile_all(
    functions: Mapping[str, Function], own: Set[str], rank_context: RankContext, kernels: _Kernels, *, compiled: bool
) -> None:
    """Compile the functions `own` that this rank calls.

    The ranks first compile one share each of all functions; a rank then loads the functions that others compiled from
    the cache on disk.
    """
    if not compiled:
        kernels.compile([functions[name] for name in functions if name in own])
        return
    shares = _shares(functions, rank_context.mesh.ranks)
    if mine := shares.pop(rank_context.rank):
        kernels.compile([functions[name] for name in mine])
    if shares:
        # A barrier that can be cancelled if compilation fails on a rank.
        rank_context.transport.agree(Group.of(range(rank_context.mesh.ranks), rank_context.rank), 0)
    for share in shares:
        # The cache holds each share as a whole.
        if not own.isdisjoint(share):
            kernels.compile([functions[name] for name in share])


def _shares(functions: Mapping[str, Function], ranks: int) -> list[list[str]]:
    """The functions that each rank compiles: shares with about the same number of ops."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    ops = [0] * ranks
    for name in sorted(functions, key=lambda name: -len(functions[name].ops)):
        rank = ops.index(min(ops))
        shares[rank].append(name)
        ops[rank] += len(functions[name].ops)
    return shares
