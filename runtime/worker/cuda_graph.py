"""CUDA graphs of programs: a run is captured once, then replayed by one launch on the same memory.

On a GPU many small kernels take longer to launch than to run. A captured run reads and writes fixed addresses:
parameters are read in place, all other operands are copied to the captured addresses. Gradients are returned in place,
valid until the next run; all other results are copied.

Ranks that communicate all capture a run, all replay it, or all run it eagerly: NCCL cannot match a captured collective
with one that is not. Each rank's preference depends on its own memory, so the ranks agree before each run.
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
"""An eager run: from the operands, and for each result whether it is wanted, to the results."""

SETTLED: Final = 2
"""Eager runs before a capture: afterwards everything is compiled, and memory that runs reuse is allocated."""

MISFITS: Final = 2
"""Successive runs that do not fit a graph, after which it is released."""

TRIES: Final = 3
"""Captures of one program at most, without those that were released for another program."""

LENT: Final = 32
"""Successive runs during which a gradient of an earlier one is in use, after which a graph is released for good."""

IN_PLACE: Final = frozenset({"param", "constant"})
"""Roles of operands that a graph reads in place: their addresses rarely change between runs."""

COPIED: Final = frozenset({"input", "buffer", "tangent", "key"})
"""Roles of operands that are copied: even a buffer's address changes, if it is the result of the previous run."""


class RunMode(IntEnum):
    """The mode of one run of a program."""

    EAGER = 0
    CAPTURE = 1
    REPLAY = 2


def obstacle(main: Function, functions: Iterable[Function]) -> str:
    """Why a program cannot be captured; empty if all operands are in place or cheap to copy, and no op needs the host.

    The activations that a forward saves for its backward are neither: each replay would copy them all.
    """
    if not all(main.param_role(index).kind in IN_PLACE | COPIED for index in range(len(main.params))):
        return "it reads what a forward has saved"
    if any(main.result_role(index).kind == "saved" for index in range(len(main.results))):
        return "a backward reads what it saves"
    waits = (op.name for function in functions for op in function.ops if declaration_of(op).host_reads)
    return next((f"the host takes part in `{name}`" for name in waits), "")


class GraphRecorder:
    """Runs a program: eagerly for SETTLED runs, then by replaying its graph where the operands fit."""

    def __init__(
        self, main: Function, context: WorkerContext, group: Group, execute: Execute, say: Callable[[str], None]
    ) -> None:
        """`group` contains the ranks that communicate in the program; `say` is told why it is not captured."""
        self._context = context
        self._group = group
        self._execute = execute
        self._say = say
        self._in_place = [main.param_role(index).kind in IN_PLACE for index in range(len(main.params))]
        self._lent = [main.result_role(index).kind == "grad" for index in range(len(main.results))]
        self._graph: _CapturedGraph | None = None
        self._runs = self._misfits = self._lent_runs = self._tries = 0
        self.repeated = 0

    def run(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> Tensors:
        self._runs += 1
        mode = self._preferred(operands, wanted)
        agreed = mode if self._all_prefer(mode) else RunMode.EAGER
        if agreed is RunMode.CAPTURE:
            self._graph = self._captured(operands, wanted)
        if self._graph is not None and agreed is not RunMode.EAGER:
            return self._replayed(self._graph, operands)
        if self._graph is not None:
            self._missed(self._graph)
        return self._execute(operands, wanted)

    def _preferred(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> RunMode:
        """The mode that this rank prefers for the run."""
        if self._graph is not None:
            return RunMode.REPLAY if self._graph.fits(operands, wanted) else RunMode.EAGER
        is_due = self._runs > SETTLED and self._tries < TRIES
        if is_due and not self._has_memory():
            self._say("memory is too short for a second pool as large as the highest peak")
            return RunMode.EAGER
        return RunMode.CAPTURE if is_due else RunMode.EAGER

    def _all_prefer(self, mode: RunMode) -> bool:
        return self._group.size == 1 or self._context.transport.agree(self._group, mode)

    def _replayed(self, graph: _CapturedGraph, operands: Sequence[Tensor | None]) -> Tensors:
        self._misfits = self._lent_runs = 0
        self.repeated += 1
        return graph.run(operands)

    def _missed(self, graph: _CapturedGraph) -> None:
        """A run did without the graph."""
        if graph.is_lent:
            self._lent_runs += 1
        else:
            self._misfits += 1
        if self._lent_runs >= LENT:
            self._tries = TRIES
            self._forget("gradients of an earlier run are always in use")
        elif self._misfits >= MISFITS:
            self._forget(f"{TRIES} captures no longer fitted, as parameters moved or other results were asked for")

    def release(self) -> None:
        """Give the memory of the graph back, for another program; it may be captured again after SETTLED more runs."""
        if self._graph is not None:
            self._tries -= 1
            self._forget("")

    def _forget(self, reason: str) -> None:
        """`reason` is why there will be no other graph, if that is so."""
        self._graph = None
        self._runs = self._misfits = self._lent_runs = 0
        if self._tries >= TRIES:
            self._say(reason)

    def _has_memory(self) -> bool:
        """Whether free memory covers the peak of runs twice: a graph keeps a pool of that size between runs."""
        backend = self._context.backend
        return backend.free_bytes() >= 2 * (backend.peak() - backend.resident_bytes())

    def _captured(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> _CapturedGraph | None:
        """The captured run; None if capture failed on a rank, after which this program is not captured again."""
        self._tries += 1
        inputs = [
            operand if in_place or operand is None else own(operand)
            for operand, in_place in zip(operands, self._in_place, strict=True)
        ]
        captured = None
        try:
            captured = self._context.backend.record(lambda: self._execute(inputs, wanted))
        except (RuntimeError, PeerLost) as error:
            self._context.transport.abandon()
            self._say(f"the capture failed ({str(error).partition(chr(10))[0]})")
        # If capture failed on one rank, no rank keeps its graph.
        outcome = RunMode.EAGER if captured is None else RunMode.CAPTURE
        if not self._all_prefer(outcome) or captured is None:
            self._tries = TRIES
            return None
        replay, results = captured
        copied = [None if in_place else tensor for tensor, in_place in zip(inputs, self._in_place, strict=True)]
        fixed = [
            _address(tensor) if in_place else None for tensor, in_place in zip(inputs, self._in_place, strict=True)
        ]
        return _CapturedGraph(replay, tuple(wanted), copied, fixed, results, self._lent)


_Address = tuple[int, torch.Size, tuple[int, ...], torch.dtype]
"""The memory that a graph reads for an operand: data pointer, shape, strides, element type."""


def _address(tensor: Tensor | None) -> _Address | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


@dataclass(frozen=True, slots=True)
class _CapturedGraph:
    """A captured run of a program."""

    replay: Callable[[], None]
    wanted: tuple[bool, ...]
    copied: Tensors
    """The tensors from which the graph reads copied operands; None for operands in place."""
    fixed: list[_Address | None]
    """The addresses of operands in place, which the graph does not keep alive."""
    results: Tensors
    lent: list[bool]
    """Per result, whether it is returned in place, not as a copy."""

    def fits(self, operands: Sequence[Tensor | None], wanted: Sequence[bool]) -> bool:
        """Whether operands in place have not moved, the same results are wanted, and no last gradient is in use."""
        addresses = (_address(operand) for operand in operands)
        return (
            self.wanted == tuple(wanted)
            and all(known is None or known == here for known, here in zip(self.fixed, addresses, strict=True))
            and not self.is_lent
        )

    @property
    def is_lent(self) -> bool:
        """Whether somebody still has a gradient of the last run."""
        return any(lent and result is not None and is_shared(result) for result, lent in self._pairs())

    def run(self, operands: Sequence[Tensor | None]) -> Tensors:
        for target, operand in zip(self.copied, operands, strict=True):
            if target is not None and operand is not None:
                target.copy_(operand)
        self.replay()
        return [None if result is None else result.detach() if lent else own(result) for result, lent in self._pairs()]

    def _pairs(self) -> zip[tuple[Tensor | None, bool]]:
        return zip(self.results, self.lent, strict=True)
