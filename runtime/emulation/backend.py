"""The device of a worker that emulates a GPU: memory of the host, kernels interpreted, a second stream on a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import BEHIND, CpuBackend, Result, Run
from moaic.runtime.host.gpu_specs import Target
from moaic.runtime.host.gpus import CPU

GPU = torch.device("cuda", 0)


class EmulatedGpuBackend:
    """A GPU whose first stream is the worker's thread; its side stream is another thread."""

    def __init__(self, target: Target) -> None:
        self.device = torch.device(CPU)
        self.compiled_for = GPU
        self._target = target
        self._memory = CpuBackend()
        self._behind: deque[tuple[Future[Any], list[Tensor]]] = deque()

    def begin(self) -> None:
        from moaic.runtime.emulation.gpu import emulate

        emulate(self._target)
        threads = torch.get_num_threads()
        self._side = ThreadPoolExecutor(1, "side-stream", initializer=partial(_as_the_worker, threads))

    def staging(self, size: int) -> Tensor:
        return self._memory.staging(size)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def run_async(self, run: Run[Result], operands: list[Tensor]) -> Callable[[], Result]:
        if len(self._behind) == BEHIND:
            self._wait_for(self._behind[0][0])
        running = self._side.submit(run, [*operands])
        # Marks the operands' memory as shared, as `GpuBackend` does: it is not overwritten.
        self._behind.append((running, [operand.detach() for operand in operands]))
        return partial(self._wait_for, running)

    def _wait_for(self, running: Future[Result]) -> Result:
        result = running.result()
        while any(each is running for each, _ in self._behind):
            self._behind.popleft()
        return result

    @property
    def records(self) -> bool:
        return False

    @property
    def is_recording(self) -> bool:
        return False

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        raise RuntimeError("an emulated GPU records nothing")

    def synchronize(self) -> None:
        while self._behind:
            self._wait_for(self._behind[-1][0])

    def resident_bytes(self) -> int:
        return self._memory.resident_bytes()

    def device_bytes(self) -> int:
        return 0

    def private_bytes(self) -> int:
        return self._memory.private_bytes()

    def free_bytes(self) -> int:
        return self._memory.free_bytes()

    def peak(self) -> int:
        return 0

    def forget_peak(self) -> None:
        pass

    def launches(self) -> Mapping[str, int]:
        from moaic.runtime.emulation.triton_interpreter import LAUNCHES

        return LAUNCHES


def _as_the_worker(threads: int) -> None:
    """Settings of the worker's thread, which PyTorch keeps for each."""
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
