"""Programs: loaded on the workers once, then run on buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.layout import Mesh
from moaic.ir.specialize import Specializer, symbols_of
from moaic.ir.symbols import Symbols
from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.controller.buffers import Buffers
from moaic.runtime.controller.compiled_marks import mark_of, set_mark
from moaic.runtime.protocol.commands import Load, Run
from moaic.runtime.protocol.placement import Placement, alike


class Compilation(NamedTuple):
    """The compilation of a program in the background."""

    number: int
    """Workers do one after the other, and count them from 1."""
    mark: Path
    """The file to be made when the cache on disk has all functions."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The controller's record of a loaded program."""

    main: Function
    mesh: Mesh
    symbols: Symbols | None
    has_key: bool
    compilation: Compilation | None
    """Its compilation in the background, until that has ended."""


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
        self._places: dict[tuple[int, tuple[int, ...]], Places] = {}

    def main(self, program: int) -> Function:
        return self._loaded[program].main

    def load(self, text: str, module: Module, *, compiled: bool, recorded: bool, background: bool) -> int:
        """Send a program, whose text is that of `module`, to the workers; return its number."""
        main, mesh, pool = module.main, module.mesh, self._buffers.pool
        self._check_size(mesh)
        has_key = any(main.param_role(index).kind == "key" for index in range(len(main.params)))
        compilation = self._begun(text) if compiled and background and pool.compiles_in_background else None
        self._loaded.append(Loaded(main, mesh, symbols_of(module), has_key, compilation))
        number = len(self._loaded) - 1
        line = self._buffers.lines.here()
        pool.push(Load(line, number, text, compiled, recorded, mesh.ranks, compilation is not None))
        pool.flush()
        return number

    def _begun(self, text: str) -> Compilation | None:
        """The next compilation in the background; None for a program that was compiled before."""
        mark = mark_of(text, self._buffers.pool.size)
        if mark.exists():
            return None
        self._compilations += 1
        return Compilation(self._compilations, mark)

    def is_ready(self, program: int) -> bool:
        """Whether no compilation of a program in the background goes on."""
        loaded = self._loaded[program]
        if loaded.compilation is None:
            return True
        if not self._buffers.pool.has_compiled(loaded.compilation.number):
            return False
        set_mark(loaded.compilation.mark)
        self._loaded[program] = replace(loaded, compilation=None)
        return True

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
    ) -> None:
        """Queue a run and send the queue; `sizes` are the numbers of the program's symbols."""
        places = self._placed(program, sizes)
        # Dead buffers are freed before the run, whose gradients may then use the same memory.
        self._buffers.free_dead()
        temporary: list[Buffer] = []
        pairs = zip(inputs, places.inputs, strict=True)
        ids = [self._input(buffer, place, persistent, temporary) for buffer, place in pairs]
        names = [None if buffer is None else buffer.id for buffer in outputs]
        self._buffers.pool.push(Run(self._buffers.lines.here(), program, ids, names, key, sizes, op_by_op))
        for buffer, place in zip(outputs, places.outputs, strict=True):
            if buffer is not None:
                buffer.place, buffer.host, buffer.fill = place, None, None
        del temporary
        self._buffers.flush()

    def _input(self, buffer: Buffer, place: Placement, persistent: Collection[Buffer], temporary: list[Buffer]) -> int:
        """The id of a buffer with the value of `buffer` and the placement `place`."""
        if buffer.place is place:
            return buffer.id
        if buffer.place is None:
            self._buffers.materialize(buffer, place)
        elif not alike(buffer.place, place):
            if buffer not in persistent:
                temporary.append(self._buffers.resharded(buffer, place))
                return temporary[-1].id
            self._buffers.reshard(buffer, buffer.id, place)
            buffer.place = place
        return buffer.id


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
