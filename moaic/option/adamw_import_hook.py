"""Gives `transformers` the name `AdamW` back, whether it is imported already or will be."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

LIBRARY: Final = "transformers"
NAME: Final = "AdamW"


class Supply(MetaPathFinder):
    """While it is installed, `transformers.AdamW` exists; a transformers that has one of its own keeps it."""

    def __init__(self) -> None:
        self._given: list[ModuleType] = []

    def install(self) -> None:
        """Harmless where it is installed."""
        if self in sys.meta_path:
            return
        if LIBRARY in sys.modules:
            self.give(sys.modules[LIBRARY])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Harmless where it is not installed."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._given:
            delattr(self._given.pop(), NAME)

    def give(self, library: ModuleType) -> None:
        if hasattr(library, NAME):
            return
        from moaic.option.transformers_adamw import AdamW

        setattr(library, NAME, AdamW)
        self._given.append(library)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that gives the name once the module is there."""
        if fullname != LIBRARY:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        for found in (finder.find_spec(fullname, path, target) for finder in others):
            if found is not None and found.loader is not None:
                found.loader = _Giving(found.loader, self)
                return found
        return None


class _Giving(Loader):
    """A loader that steps back once it has loaded."""

    def __init__(self, real: Loader, supply: Supply) -> None:
        self._real = real
        self._supply = supply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for held in (module, module.__spec__):
            if held is not None:
                vars(held)["__loader__" if held is module else "loader"] = self._real
        self._real.exec_module(module)
        # Such a library may have put another module in its own place.
        self._supply.give(sys.modules.get(LIBRARY, module))


SUPPLY: Final = Supply()
