"""Where a worker stands: its rank, its device, and how it talks to the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moaic.runtime.comm.device_backend import Physical
from moaic.runtime.comm.transport import Transport


@dataclass(frozen=True, slots=True)
class Station:
    """What everything that a worker runs is given: made once, when the worker starts."""

    rank: int
    physical: Physical
    transport: Transport

    @property
    def device(self) -> torch.device:
        """On which every tensor is made."""
        return self.physical.device
