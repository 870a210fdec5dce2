"""A pool of receive buffers for pipeline stages: a buffer is reused after its last use."""

from __future__ import annotations

import torch
from torch import Tensor

from moaic.runtime.comm.reshard import is_shared


class RecvBuffers:
    """The receive buffers of one program: of each shape and type as many as were ever in use at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, reserved for the caller until no tensor shares its memory."""
        buffers = self._buffers.setdefault((shape, dtype), [])
        free = next((tensor for tensor in buffers if not is_shared(tensor)), None)
        if free is None:
            free = torch.empty(shape, dtype=dtype, device=self._device)
            buffers.append(free)
        return free.detach()  # another tensor on the same storage: while it or a view of it lives, `is_shared` is true
