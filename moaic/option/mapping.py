"""What one mapped call is: where it stands, what it means in the mode, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moaic.device.torch_private import Seam

Make = Callable[[Any], Any]
"""From the real function to ours."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """One call that means something else while the mode is on."""

    call: str
    """As a person writes it."""
    meaning: str
    """What it does in the mode, for the documentation."""
    seam: Seam
    make: Make


def always(ours: Any) -> Make:
    """A replacement that does not need the real function."""
    return lambda real: ours
