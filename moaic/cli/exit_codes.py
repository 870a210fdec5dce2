"""The exit code of `moaic` beside those of all commands (`tools/command.py`)."""

from __future__ import annotations

from typing import Final

WRONG: Final = 1
"""The ranks of a plan compute something else than one device, a first run would fail, or no plan is possible."""
