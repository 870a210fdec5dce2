"""When a worker gets no more memory: what it asked for, and what there was."""

from __future__ import annotations

import re
from typing import Final

import torch

from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.protocol.shortage import Shortage
from moaic.text.units import GIB, KIB, MIB

ASKED: Final = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)

UNITS: Final = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}

SIGNS: Final = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")
"""How PyTorch and the libraries below it say so on a CPU."""


def shortage_of(error: BaseException, backend: DeviceBackend, idle: int) -> Shortage | None:
    """What an error says of memory, if that is what it is about; to be asked where and when it was raised.

    `idle` are the bytes of `backend` that the process had for itself when it was ready.
    """
    text = str(error)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(sign in text for sign in SIGNS):
        return None
    found = ASKED.search(text)
    asked = int(float(found[1]) * UNITS[found[2]]) if found else 0
    return Shortage(asked, backend.free_bytes(), max(0, backend.private_bytes() - idle))
