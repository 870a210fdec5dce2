"""The folder for plans, measurements and kernels that moaic keeps between runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """The user's cache folder of moaic; None where MOAI_CACHE is `off` or the user has no home folder."""
    chosen = environment.get("MOAI_CACHE")
    if chosen == "off":
        return None
    if chosen:
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "moaic"
    home = environment.get("HOME")
    return Path(home) / ".cache" / "moaic" if home else None
