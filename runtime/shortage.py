"""When a worker gets no more memory: what it asked for, and what there was."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from moaic.runtime.memory import data_bytes, free_bytes

ASKED: Final = re.compile(r"tried to allocate (\d+) bytes|unable to allocate (\d+) bytes", re.IGNORECASE)

SIGNS: Final = ("DefaultCPUAllocator", "std::bad_alloc", "Cannot allocate memory")
"""How PyTorch and the libraries below it say so."""

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


def shortage_of(error: BaseException, idle: int) -> Shortage | None:
    """What an error says of memory, if that is what it is about; to be asked where and when it was raised.

    `idle` are the bytes of private memory that the process had when it was ready.
    """
    text = str(error)
    if not isinstance(error, MemoryError) and not any(sign in text for sign in SIGNS):
        return None
    found = ASKED.search(text)
    asked = int(found[1] or found[2]) if found else 0
    return Shortage(asked, free_bytes(), max(0, data_bytes("self") - idle))
