"""What carries data between workers."""

from __future__ import annotations

from enum import StrEnum


class Carrier(StrEnum):
    """What carries data between workers."""

    MEMORY = "memory"
    """Memory of the host that they share: for tensors that lie in it."""
    GLOO = "gloo"
    """Sockets of the host, to which tensors of GPUs are copied first: for several workers on one GPU, too."""
    NCCL = "nccl"
    """What GPUs are joined by: for one worker on each. PyTorch calls RCCL, for AMD's, by the same name."""
