"""Out-of-memory errors of a worker: bytes asked for, free and held."""

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
"""Texts of out-of-memory errors of PyTorch and its libraries on a CPU."""

NO_PRIMITIVE: Final = "could not create a primitive"
"""The whole text of oneDNN's error without memory for scratch or code; for an impossible primitive it says more."""


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or text == NO_PRIMITIVE:
        return True
    return any(sign in text for sign in SIGNS)


def shortage_of(error: BaseException, backend: DeviceBackend, idle: int) -> Shortage | None:
    """The shortage that caused an error; None for other errors. Call it where the error is caught, to read free bytes.

    `idle` is the private memory of the process when it became ready.
    """
    if not is_out_of_memory(error):
        return None
    match = ASKED.search(str(error))
    asked = int(float(match[1]) * UNITS[match[2]]) if match else 0
    return Shortage(asked, backend.free_bytes(), max(0, backend.private_bytes() - idle))
