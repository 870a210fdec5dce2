"""Memory for what a pipeline's stages receive: allocated once, and used again when nothing reads it any more."""

from __future__ import annotations

import torch
from torch import Tensor

from moaic.runtime.comm.reshard import is_shared


class RecvBuffers:
    """The tensors that one program has received into: as many of a kind as were ever read at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor to write to, whose memory is the caller's until the last that shares it is gone."""
        known = self._known.setdefault((shape, dtype), [])
        free = next((tensor for tensor in known if not is_shared(tensor)), None)
        if free is None:
            free = torch.empty(shape, dtype=dtype, device=self._device)
            known.append(free)
        return free.detach()  # another tensor of the same memory: what keeps it, or a view of it, is seen to share it
