"""What a worker lacked when it got no more memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

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
