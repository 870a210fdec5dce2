"""An import hook that gives `transformers` the name `AdamW` back, which version 5 removed."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

from moaic.device.import_around import ImportAround, Load

LIBRARY: Final = "transformers"
NAME: Final = "AdamW"


class AdamWImportHook:
    """Adds `transformers.AdamW` while it is installed; a library that has the name keeps its own."""

    def __init__(self) -> None:
        self._patched: list[ModuleType] = []
        self._import = ImportAround(LIBRARY, self._load)

    def install(self) -> None:
        """Installs the hook; without effect if it is installed."""
        if self._import.is_installed:
            return
        if LIBRARY in sys.modules:
            self.patch(sys.modules[LIBRARY])
        self._import.install()

    def remove(self) -> None:
        """Removes the hook and the names that it added; without effect if it is not installed."""
        if self._import.is_installed:
            self._import.remove()
        while self._patched:
            delattr(self._patched.pop(), NAME)

    def patch(self, library: ModuleType) -> None:
        if hasattr(library, NAME):
            return
        from moaic.option.transformers_adamw import AdamW

        setattr(library, NAME, AdamW)
        self._patched.append(library)

    def _load(self, load: Load, module: ModuleType) -> None:
        load(module)
        # The library may have replaced itself in sys.modules.
        self.patch(sys.modules.get(LIBRARY, module))


ADAMW_IMPORT_HOOK: Final = AdamWImportHook()
