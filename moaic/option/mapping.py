"""One mapped call: its place, its meaning in the mode, and its replacement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moaic.device.torch_private import PatchPoint

Make = Callable[[Any], Any]
"""Makes the replacement from the real function."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One call that means something else while the mode is on."""

    call: str
    """The call as the user writes it."""
    meaning: str
    """The effect in the mode, for the documentation."""
    point: PatchPoint
    make: Make


def always(ours: Any) -> Make:
    """A replacement that does not need the real function."""
    return lambda real: ours
