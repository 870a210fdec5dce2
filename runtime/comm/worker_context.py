"""Where a worker stands: its rank, its device, and how it talks to the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.comm.transport import Transport


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """What everything that a worker runs is given: made once, when the worker starts."""

    rank: int
    backend: DeviceBackend
    transport: Transport

    @property
    def device(self) -> torch.device:
        """On which every tensor is made."""
        return self.backend.device
