"""Programs: loaded on the workers once, then run on buffers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.layout import Mesh
from moaic.runtime.controller.buffer import Buffer
from moaic.runtime.controller.buffers import Buffers
from moaic.runtime.protocol.commands import Load, Run
from moaic.runtime.protocol.placement import Placement, alike


@dataclass(frozen=True, slots=True)
class Loaded:
    """The controller's record of a loaded program."""

    main: Function
    mesh: Mesh
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    has_key: bool


class LoadedPrograms:
    """All programs of an accelerator, by number."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._loaded: list[Loaded] = []

    def main(self, program: int) -> Function:
        return self._loaded[program].main

    def load(self, text: str, module: Module, *, compiled: bool, recorded: bool) -> int:
        """Send a program, whose text is that of `module`, to the workers; return its number."""
        main, mesh = module.main, module.mesh
        self._check_size(mesh)
        keys = [index for index in range(len(main.params)) if main.param_role(index).kind == "key"]
        inputs = [param.type.layout for index, param in enumerate(main.params) if index not in keys]
        loaded = Loaded(
            main,
            mesh,
            tuple(self._buffers.place(mesh, layout) for layout in inputs),
            tuple(self._buffers.place(mesh, result.type.layout) for result in main.results),
            bool(keys),
        )
        self._loaded.append(loaded)
        number = len(self._loaded) - 1
        line = self._buffers.lines.here()
        self._buffers.pool.push(Load(line, number, text, compiled, recorded, mesh.ranks))
        self._buffers.pool.flush()
        return number

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
    ) -> None:
        """Queue a run and send the queue."""
        loaded = self._loaded[program]
        # Dead buffers are freed before the run, whose gradients may then use the same memory.
        self._buffers.free_dead()
        temporary: list[Buffer] = []
        pairs = zip(inputs, loaded.inputs, strict=True)
        ids = [self._input(buffer, place, persistent, temporary) for buffer, place in pairs]
        names = [None if buffer is None else buffer.id for buffer in outputs]
        self._buffers.pool.push(Run(self._buffers.lines.here(), program, ids, names, key))
        for buffer, place in zip(outputs, loaded.outputs, strict=True):
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
    if len(inputs) != len(loaded.inputs) or len(outputs) != len(loaded.outputs):
        raise ValueError(
            f"program {program} has {len(loaded.inputs)} inputs and {len(loaded.outputs)} outputs, "
            f"not {len(inputs)} and {len(outputs)}"
        )
    if loaded.has_key and key is None:
        raise ValueError(f"program {program} needs a random key")
