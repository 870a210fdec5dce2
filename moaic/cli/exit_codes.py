"""Exit codes of the command line, beside 0."""

from __future__ import annotations

from typing import Final

WRONG: Final = 1
"""The ranks of a plan compute something else than one device, or a first run would fail."""

MISTAKE: Final = 2
"""The user's arguments or input are invalid."""
