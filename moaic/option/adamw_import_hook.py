"""An import hook that gives `transformers` the name `AdamW` back, which version 5 removed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

LIBRARY: Final = "transformers"
NAME: Final = "AdamW"


class AdamWImportHook(MetaPathFinder):
    """Adds `transformers.AdamW` while it is installed; a library that has the name keeps its own."""

    def __init__(self) -> None:
        self._patched: list[ModuleType] = []

    def install(self) -> None:
        """Installs the hook; without effect if it is installed."""
        if self in sys.meta_path:
            return
        if LIBRARY in sys.modules:
            self.patch(sys.modules[LIBRARY])
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Removes the hook and the names that it added; without effect if it is not installed."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._patched:
            delattr(self._patched.pop(), NAME)

    def patch(self, library: ModuleType) -> None:
        if hasattr(library, NAME):
            return
        from moaic.option.transformers_adamw import AdamW

        setattr(library, NAME, AdamW)
        self._patched.append(library)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that adds the name after loading."""
        if fullname != LIBRARY:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        for found in (finder.find_spec(fullname, path, target) for finder in others):
            if found is not None and found.loader is not None:
                found.loader = _PatchingLoader(found.loader, self)
                return found
        return None


class _PatchingLoader(Loader):
    """A loader that delegates to the real one, restores it on the module, and adds the name."""

    def __init__(self, real: Loader, hook: AdamWImportHook) -> None:
        self._real = real
        self._hook = hook

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for held in (module, module.__spec__):
            if held is not None:
                vars(held)["__loader__" if held is module else "loader"] = self._real
        self._real.exec_module(module)
        # The library may have replaced itself in sys.modules.
        self._hook.patch(sys.modules.get(LIBRARY, module))


ADAMW_IMPORT_HOOK: Final = AdamWImportHook()
