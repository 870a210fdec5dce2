"""Programs: loaded on the workers once, then run on buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.layout import Mesh
from moaic.ir.specialize import Specializer, symbols_of
from moaic.ir.symbols import Symbols
from moaic.runtime.controller import compile_log
from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.controller.buffers import Buffers
from moaic.runtime.controller.compiled_marks import mark_of
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.protocol.commands import Adopt, Load, Run
from moaic.runtime.protocol.placement import Placement, alike


class CompileState(Enum):
    """How far the compilation of a program in the background is."""

    RUNNING = 0
    ADOPTED = 1
    """The workers have been told to run compiled; it is also the state of a program without such a compilation."""
    FAILED = 2
    """The program runs op by op for good."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The controller's record of a loaded program."""

    main: Function
    mesh: Mesh
    symbols: Symbols | None
    has_key: bool
    compilation: CompileState
    number: int
    """Of the compilation in the background: workers do one after the other, and count them from 1."""


class Places(NamedTuple):
    """Where a run has its inputs and outputs, the key left out."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


PLACES_KEPT: Final = 1024
"""Programs at sizes of which the placements are kept."""


class LoadedPrograms:
    """All programs of an accelerator, by number."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._loaded: list[Loaded] = []
        self._compilations = 0
        buffers.pool.adopted = self._adopted
        buffers.pool.not_captured = self._not_captured
        self._reasons: set[str] = set()
        self._places: dict[tuple[int, tuple[int, ...]], Places] = {}

    def main(self, program: int) -> Function:
        return self._loaded[program].main

    def load(self, text: str, module: Module, *, compiled: bool, graphs: GraphMode, background: bool) -> int:
        """Send a program, whose text is that of `module`, to the workers; return its number."""
        main, mesh, pool = module.main, module.mesh, self._buffers.pool
        self._check_size(mesh)
        has_key = any(main.param_role(index).kind == "key" for index in range(len(main.params)))
        mark = mark_of(text, pool.devices, pool.hosts) if compiled else None
        background = background and mark is not None and not mark.exists()
        self._compilations += background
        compilation = CompileState.RUNNING if background else CompileState.ADOPTED
        self._loaded.append(Loaded(main, mesh, symbols_of(module), has_key, compilation, self._compilations))
        number = len(self._loaded) - 1
        line = self._buffers.lines.here()
        pool.push(Load(line, number, text, compiled, graphs.value, mesh.ranks, background, str(mark or "")))
        pool.flush()
        return number

    def are_compiled(self, programs: Sequence[int], *, at_once: bool) -> bool:
        """Whether runs of programs, which belong together, are compiled from now on; else they must be op by op.

        With `at_once` they are where that is possible at all: the workers wait for the compiler.
        """
        loaded = [self._loaded[program] for program in programs]
        states = {each.compilation for each in loaded}
        if CompileState.FAILED in states:
            return False
        if CompileState.RUNNING in states:
            latest = max(each.number for each in loaded)
            if not at_once and not self._buffers.pool.has_compiled(latest):
                return False
            self._buffers.pool.push(Adopt(self._buffers.lines.here(), list(programs)))
            self._set(programs, CompileState.ADOPTED)
        return True

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled in the background."""
        running = (each.number for each in self._loaded if each.compilation is CompileState.RUNNING)
        return any(not self._buffers.pool.has_compiled(number) for number in running)

    def _set(self, programs: Sequence[int], compilation: CompileState) -> None:
        for program in programs:
            self._loaded[program] = replace(self._loaded[program], compilation=compilation)

    def _not_captured(self, reason: str) -> None:
        """Said once: ranks have the same reasons."""
        if reason not in self._reasons:
            self._reasons.add(reason)
            compile_log.not_captured(reason)

    def _adopted(
        self, host: str, programs: Sequence[int], functions: int, seconds: float, runs: int, failed: str
    ) -> None:
        if not failed:
            compile_log.compiled(functions, seconds, runs)
        elif any(self._loaded[program].compilation is not CompileState.FAILED for program in programs):
            # The first of several workers.
            self._set(programs, CompileState.FAILED)
            compile_log.not_compiled(failed, host)

    def _placed(self, program: int, sizes: tuple[int, ...]) -> Places:
        """The places of a run at these sizes: strides of splits depend on them."""
        if (program, sizes) not in self._places:
            if len(self._places) >= PLACES_KEPT:
                self._places.clear()
            loaded = self._loaded[program]
            main, place = loaded.main, partial(self._buffers.place, loaded.mesh)
            at = Specializer({} if loaded.symbols is None else loaded.symbols.numbers(sizes))
            inputs = [param for index, param in enumerate(main.params) if main.param_role(index).kind != "key"]
            self._places[program, sizes] = Places(
                tuple(place(at.layout(param.type.layout)) for param in inputs),
                tuple(place(at.layout(result.type.layout)) for result in main.results),
            )
        return self._places[program, sizes]

    def _check_size(self, mesh: Mesh) -> None:
        workers = self._buffers.pool.size
        if mesh.ranks > workers:
            raise Diagnostic(
                f"the program is for {mesh.ranks} workers, and there are {workers}",
                hint="set MOAI_FLAVOR, or call torch.moai.set_flavor before the first use of the device",
            )

    def check(self, program: int, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], key: object) -> None:
        """Raise ValueError if the numbers of operands are not those of the program."""
        _check_arity(self._loaded[program], program, inputs, outputs, key)

    def run(
        self,
        program: int,
        inputs: Sequence[Buffer],
        outputs: Sequence[Buffer | None],
        key: tuple[int, int] | None,
        persistent: Collection[Buffer],
        sizes: tuple[int, ...] = (),
        *,
        op_by_op: bool = False,
    ) -> int:
        """Queue a run and send the queue; return the command's number. `sizes` are those of the program's symbols."""
        places = self._placed(program, sizes)
        # Dead buffers are freed before the run, whose gradients may then use the same memory.
        self._buffers.free_dead()
        pairs = list(zip(inputs, places.inputs, strict=True))
        moved = [index for index, pair in enumerate(pairs) if not self._settle(*pair, persistent)]
        copies = self._buffers.resharded([pairs[index] for index in moved])
        ids = [buffer.id for buffer in inputs]
        for index, copy in zip(moved, copies, strict=True):
            ids[index] = copy.id
        names = [None if buffer is None else buffer.id for buffer in outputs]
        run = Run(self._buffers.lines.here(), program, ids, names, key, sizes, op_by_op)
        number = self._buffers.pool.push(run)
        for buffer, place in zip(outputs, places.outputs, strict=True):
            if buffer is not None:
                buffer.place, buffer.host, buffer.fill = place, None, None
        del copies
        self._buffers.flush()
        return number

    def _settle(self, buffer: Buffer, place: Placement, persistent: Collection[Buffer]) -> bool:
        """Whether a buffer has the placement, once it has been sent or resharded if it may be; else it needs a copy."""
        if buffer.place is place and (buffer.rests or buffer not in persistent):
            return True
        if buffer.place is None:
            self._buffers.materialize(buffer, place)
        elif not alike(buffer.place, place):
            if buffer not in persistent:
                return False
            self._buffers.reshard_in_place(buffer, place)
        buffer.rests = buffer.rests or buffer in persistent
        return True


def _check_arity(
    loaded: Loaded, program: int, inputs: Sequence[Buffer], outputs: Sequence[Buffer | None], key: object
) -> None:
    needed, made = len(loaded.main.params) - loaded.has_key, len(loaded.main.results)
    if len(inputs) != needed or len(outputs) != made:
        raise ValueError(
            f"program {program} has {needed} inputs and {made} outputs, not {len(inputs)} and {len(outputs)}"
        )
    if loaded.has_key and key is None:
        raise ValueError(f"program {program} needs a random key")
