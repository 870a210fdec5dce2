"""The context of a worker: its rank, its device and its transport."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.comm.transport import Transport


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """The context passed to all that a worker runs; made once, when the worker starts."""

    rank: int
    backend: DeviceBackend
    transport: Transport
    local: Sequence[int] = range(sys.maxsize)
    """The workers of this one's host; by default all."""

    @property
    def device(self) -> torch.device:
        """The device of all tensors of the worker."""
        return self.backend.device

    @property
    def compiled_for(self) -> torch.device:
        """The device that functions are compiled for."""
        return self.backend.compiled_for
