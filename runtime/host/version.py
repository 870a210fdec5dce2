"""Which moaic this is: what `pyproject.toml` says, known without looking through all that is installed."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
