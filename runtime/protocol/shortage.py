"""A worker's report of an out-of-memory error."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.text.units import mib


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes asked for (0 if the error does not state it), free, and held by the worker since its start."""

    asked: int
    free: int
    held: int

    def __str__(self) -> str:
        wanted = f"{mib(self.asked)} more" if self.asked else "more memory"
        return f"it holds {mib(self.held)}, asked for {wanted}, and {mib(self.free)} were free"
