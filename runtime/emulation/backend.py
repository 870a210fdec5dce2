"""The device of a worker that emulates a GPU: memory of the host, kernels interpreted, a side stream on a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import CpuBackend, Moment, Result, Run
from moaic.runtime.emulation.recording import Recording
from moaic.runtime.emulation.side_stream import SideStream
from moaic.runtime.host.gpu_specs import Target
from moaic.runtime.host.gpus import CPU

GPU: Final = torch.device("cuda", 0)


class EmulatedGpuBackend:
    """A GPU whose first stream is the worker's thread; its side stream is another thread."""

    def __init__(self, target: Target) -> None:
        self.device = torch.device(CPU)
        self.compiled_for = GPU
        self._target = target
        self._memory = CpuBackend()
        self.is_recording = False

    def begin(self) -> None:
        from moaic.runtime.emulation.gpu import emulate

        emulate(self._target)
        self._side = SideStream()

    def staging(self, size: int) -> Tensor:
        return self._memory.staging(size)

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def run_async(self, run: Run[Result], operands: list[Tensor]) -> Callable[[], Result]:
        # All that workers run so are collectives and passes of a ring, which give lists of tensors.
        return cast("Callable[[], Result]", self._side.start(cast("Run[list[Tensor]]", run), operands))

    @property
    def records(self) -> bool:
        return True

    def record(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        recording = Recording()
        self.is_recording = True
        try:
            with recording:
                result = run()
        finally:
            self.is_recording = False
        recording.spoil()
        return recording.repeat, result

    def moment(self) -> Moment:
        return self._memory.moment()

    def synchronize(self) -> None:
        self._side.wait()

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
