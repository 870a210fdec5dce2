"""The carriers of data between workers."""

from __future__ import annotations

from enum import StrEnum


class Carrier(StrEnum):
    """A carrier of the data of collectives."""

    MEMORY = "memory"
    """Shared memory of the host, and encrypted links to other hosts; tensors of GPUs are copied to the host first."""
    GLOO = "gloo"
    """Sockets; tensors of GPUs are copied to the host first. Several workers may share a GPU."""
    NCCL = "nccl"
    """Links between GPUs, for one worker per GPU. Also RCCL for AMD's, which PyTorch calls NCCL. Not encrypted."""
