"""Runs of a program that are recorded once and then repeated by one launch, on the memory that they were recorded on.

On a GPU many small kernels take longer to ask for than to run. A recorded run reads and writes fixed places: parameters
are read where they lie, everything else is copied in. Gradients are handed out where they were made, for as long as the
next run is not due; all other results are copied.

Ranks that communicate all record a run, all repeat it, or all run it as it is written: NCCL takes no collective that is
recorded here and not there. What each would choose depends on its own memory, so they ask one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from moaic.ir.graph import Function
from moaic.ir.ops import declaration_of
from moaic.runtime.comm.reshard import is_shared, own
from moaic.runtime.comm.shm_slots import PeerLost
from moaic.runtime.comm.transport import Group
from moaic.runtime.comm.worker_context import WorkerContext

Tensors = list[Tensor | None]
Execute = Callable[[Sequence[Tensor | None], Sequence[bool]], Tensors]
"""A run as it is written: from operands and which results are wanted to the results."""

SETTLED: Final = 2
"""Runs before one is recorded: by then everything is compiled, and what runs keep between them is there."""

MISFITS: Final = 2
"""Runs on end that a recording does not fit, after which it is given up."""

TRIES: Final = 3
"""Recordings that are made of one program at most."""

RESTING: Final = frozenset({"param", "constant"})
GIVEN: Final = frozenset({"input", "buffer", "tangent", "key"})
"""Roles of operands that are copied: a buffer may be what the run before has made of it, and lie elsewhere."""


class RunMode(IntEnum):
    """How a run is to be done."""

    AS_WRITTEN = 0
    RECORD = 1
    REPEAT = 2


def can_be_recorded(main: Function, functions: Iterable[Function]) -> bool:
    """Whether all operands rest or are small enough to copy: what a forward saves for its backward is not.

    Nor can functions be that the host has a part in.
    """
    is_copied = all(main.param_role(index).kind in RESTING | GIVEN for index in range(len(main.params)))
    return is_copied and not any(declaration_of(op).host_reads for function in functions for op in function.ops)


class GraphRecorder:
    """Runs a program: as it is written until it has settled, from then on by its recording, where that fits."""

    def __init__(self, main: Function, context: WorkerContext, group: Group, execute: Execute) -> None:
        """`group` are the ranks that communicate in the program."""
        self._context = context
        self._group = group
        self._execute = execute
        self._rests = [main.param_role(index).kind in RESTING for index in range(len(main.params))]
        self._lent = [main.result_role(index).kind == "grad" for index in range(len(main.results))]
        self._recording: _Recording | None = None
        self._runs = self._misfits = self._tries = 0
        self.repeated = 0

    def run(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> Tensors:
        self._runs += 1
        choice = self._choice(operands, wanted)
        agreed = choice if self._all_chose(choice) else RunMode.AS_WRITTEN
        if agreed is RunMode.RECORD:
            self._recording = self._recorded(operands, wanted)
        if self._recording is not None and agreed is not RunMode.AS_WRITTEN:
            return self._repeated(self._recording, operands)
        if self._recording is not None:
            self._misfits += 1
            if self._misfits >= MISFITS:
                self.forget()
        return self._execute(operands, wanted)

    def _choice(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> RunMode:
        """What this rank would do."""
        if self._recording is not None:
            return RunMode.REPEAT if self._recording.fits(operands, wanted) else RunMode.AS_WRITTEN
        is_due = self._runs > SETTLED and self._tries < TRIES and self._has_room()
        return RunMode.RECORD if is_due else RunMode.AS_WRITTEN

    def _all_chose(self, choice: RunMode) -> bool:
        return self._group.size == 1 or self._context.transport.agree(self._group, choice)

    def _repeated(self, recording: _Recording, operands: Sequence[Tensor | None]) -> Tensors:
        self._misfits = 0
        self.repeated += 1
        return recording.run(operands)

    def forget(self) -> None:
        """Gives back the recording's memory; there may be another once runs have settled."""
        self._recording = None
        self._runs = self._misfits = 0

    def _has_room(self) -> bool:
        """Whether a second of the highest peak so far would still fit: a recording keeps its memory between runs."""
        backend = self._context.backend
        return backend.free_bytes() >= 2 * (backend.peak() - backend.resident_bytes())

    def _recorded(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> _Recording | None:
        """None where a device cannot, for whatever reason: then there is nothing to gain in trying again."""
        self._tries += 1
        places = [
            operand if rests or operand is None else own(operand)
            for operand, rests in zip(operands, self._rests, strict=True)
        ]
        recorded = None
        try:
            recorded = self._context.backend.record(lambda: self._execute(places, wanted))
        except (RuntimeError, PeerLost):
            self._context.transport.abandon()
        # One that failed leaves no other with a recording.
        outcome = RunMode.AS_WRITTEN if recorded is None else RunMode.RECORD
        if not self._all_chose(outcome) or recorded is None:
            self._tries = TRIES
            return None
        repeat, results = recorded
        copied = [None if rests else place for place, rests in zip(places, self._rests, strict=True)]
        resting = [_place(place) if rests else None for place, rests in zip(places, self._rests, strict=True)]
        return _Recording(repeat, tuple(wanted), copied, resting, results, self._lent)


_Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]


def _place(tensor: Tensor | None) -> _Place | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True)
class _Recording:
    """One run of a program."""

    repeat: Callable[[], None]
    wanted: tuple[bool, ...]
    copied: Tensors
    """Where operands that do not rest are read."""
    resting: list[_Place | None]
    """Where the others lie: known, and not kept."""
    results: Tensors
    lent: list[bool]
    """Which of the results are handed out where they were made."""

    def fits(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> bool:
        """Whether all that rests lies where it lay, as much is wanted, and nobody has a gradient of the run before."""
        here = (_place(operand) for operand in operands)
        return (
            self.wanted == tuple(wanted)
            and all(place is None or place == at for place, at in zip(self.resting, here, strict=True))
            and not any(lent and result is not None and is_shared(result) for result, lent in self._pairs())
        )

    def run(self, operands: Sequence[Tensor | None]) -> Tensors:
        for place, operand in zip(self.copied, operands, strict=True):
            if place is not None and operand is not None:
                place.copy_(operand)
        self.repeat()
        return [None if result is None else result.detach() if lent else own(result) for result, lent in self._pairs()]

    def _pairs(self) -> zip[tuple[Tensor | None, bool]]:
        return zip(self.results, self.lent, strict=True)
