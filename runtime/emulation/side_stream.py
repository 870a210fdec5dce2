"""The side stream of an emulated GPU: a thread that is late, and holds no reference to what it reads.

Memory that a worker gives away too early is overwritten under it, as glibc fills what is freed (`MALLOC_PERTURB_`,
which the launcher sets).
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import BEHIND, Run
from moaic.runtime.comm.reshard import is_shared

Tensors = list[Tensor]

DELAYS: Final = (0.0, 0.0, 1e-3, 5e-3)
"""Seconds by which work is late, all equally likely."""


class SideStream:
    """Runs work in order, each piece late by a time that is drawn."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "side-stream", _as_the_worker, (torch.get_num_threads(),))
        self._delays = random.Random(os.getpid())
        self._behind: deque[_Work] = deque()

    def start(self, run: Run[Tensors], operands: Tensors) -> Callable[[], Tensors]:
        """Starts `run` on the operands; the function that is returned waits for its results."""
        if len(self._behind) == BEHIND:
            self._wait_for(self._behind[0])
        aliases, delay = list(map(_Alias.of, operands)), self._delays.choice(DELAYS)
        work = _Work(self._thread.submit(_late, run, aliases, delay), operands)
        self._behind.append(work)
        return partial(self._wait_for, work)

    def wait(self) -> None:
        """Returns when all is done."""
        if self._behind:
            self._wait_for(self._behind[-1])

    def _wait_for(self, work: _Work) -> Tensors:
        """The results of some work; all earlier work is over, too."""
        while work in self._behind:
            self._behind.popleft().end()
        return work.results


@dataclass(eq=False)
class _Work:
    """Work on the side stream."""

    running: Future[Tensors]
    operands: Tensors
    results: Tensors = field(default_factory=list[Tensor])

    def __post_init__(self) -> None:
        # Marks the operands' memory as shared, as `GpuBackend` does: it is not overwritten until the work is over.
        self.operands = [operand.detach() for operand in self.operands]

    def end(self) -> None:
        """Waits; a result in the memory of an operand keeps that memory from now on."""
        owners = {operand.untyped_storage().data_ptr(): operand for operand in self.operands}
        self.results = [
            _on_memory_of(owners.get(each.untyped_storage().data_ptr()), each) for each in self.running.result()
        ]
        self.operands = []


def _late(run: Run[Tensors], operands: list[_Alias], delay: float) -> Tensors:
    time.sleep(delay)
    return run([operand.tensor for operand in operands])


@dataclass(frozen=True, slots=True)
class _Alias:
    """A tensor on memory that it does not keep."""

    tensor: Tensor
    others: Tensor | None
    """A second tensor on it, where there is one on the memory itself."""

    @staticmethod
    def of(tensor: Tensor) -> _Alias:
        alias = _without_reference(tensor)
        return _Alias(alias, alias.detach() if is_shared(tensor) else None)


def _without_reference(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor.clone()
    flat = torch.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return _on_memory_of(flat, tensor)


def _on_memory_of(owner: Tensor | None, like: Tensor) -> Tensor:
    """A tensor of the geometry of another one, on the storage of its owner; itself if that is nobody."""
    if owner is None:
        return like
    made: Any = torch.empty(0, dtype=like.dtype)
    return made.set_(owner.untyped_storage(), like.storage_offset(), like.shape, like.stride())


def _as_the_worker(threads: int) -> None:
    """Settings of the worker's thread, which PyTorch keeps for each."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
