"""The version of moaic, as in `pyproject.toml`: a lookup by importlib.metadata would be slow."""

from __future__ import annotations

from typing import Final

VERSION: Final = "0.1.0"
