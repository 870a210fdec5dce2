"""Something done around the import of a library: a finder at the front of `sys.meta_path`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Load = Callable[[ModuleType], None]


class ImportAround(MetaPathFinder):
    """While installed, has `around` load a library: it is called with what loads, and with the empty module."""

    def __init__(self, library: str, around: Callable[[Load, ModuleType], None]) -> None:
        self._library = library
        self._around = around

    @property
    def is_installed(self) -> bool:
        return self in sys.meta_path

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the other finders, with a loader that calls `around`."""
        if fullname != self._library:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        for found in (finder.find_spec(fullname, path, target) for finder in others):
            if found is not None and found.loader is not None:
                found.loader = _Loader(found.loader, self._around)
                return found
        return None


class _Loader(Loader):
    """A loader that leaves all to the real one, and restores it on the module."""

    def __init__(self, real: Loader, around: Callable[[Load, ModuleType], None]) -> None:
        self._real = real
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for held in (module, module.__spec__):
            if held is not None:
                vars(held)["__loader__" if held is module else "loader"] = self._real
        self._around(self._real.exec_module, module)
