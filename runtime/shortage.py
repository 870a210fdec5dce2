"""When a worker gets no more memory: what it asked for, and what there was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import torch

from moaic.runtime.physical import Physical

ASKED: Final = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", re.IGNORECASE)

UNITS: Final = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

SIGNS: Final = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")
"""How PyTorch and the libraries below it say so on a CPU."""

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes; `asked` is 0 where the error does not say, `held` what the worker has taken since it was ready."""

    asked: int
    free: int
    held: int

    def __str__(self) -> str:
        wanted = f"{self.asked / MIB:.0f} MiB more" if self.asked else "more memory"
        return f"it holds {self.held / MIB:.0f} MiB, asked for {wanted}, and {self.free / MIB:.0f} MiB were free"


def shortage_of(error: BaseException, physical: Physical, idle: int) -> Shortage | None:
    """What an error says of memory, if that is what it is about; to be asked where and when it was raised.

    `idle` are the bytes of `physical` that the process had for itself when it was ready.
    """
    text = str(error)
    if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(sign in text for sign in SIGNS):
        return None
    found = ASKED.search(text)
    asked = int(float(found[1]) * UNITS[found[2]]) if found else 0
    return Shortage(asked, physical.free(), max(0, physical.taken() - idle))
