"""What a worker lacked when it got no more memory."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.text.units import mib


@dataclass(frozen=True, slots=True)
class Shortage:
    """Bytes; `asked` is 0 where the error does not say, `held` what the worker has taken since it was ready."""

    asked: int
    free: int
    held: int

    def __str__(self) -> str:
        wanted = f"{mib(self.asked)} more" if self.asked else "more memory"
        return f"it holds {mib(self.held)}, asked for {wanted}, and {mib(self.free)} were free"
