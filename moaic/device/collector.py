"""Python's garbage collector, asked for less while much is made that stays: modules that are imported, and graphs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

from moaic.device.import_around import ImportAround, Load

SELDOM: Final = 20_000
"""Objects until a collection, instead of 700. Measured: 10,000 and 50,000 save as much as no collection at all."""


@contextmanager
def collecting_seldom() -> Generator[None]:
    """Collect seldom for the time of the block, unless the user has switched collection off or made it rarer."""
    before = gc.get_threshold()
    if not 0 < before[0] < SELDOM:
        yield
        return
    gc.set_threshold(SELDOM, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def collect_seldom_during_import(library: str) -> None:
    """Collect seldom when the library is imported, if it has not been yet."""

    def around(load: Load, module: ModuleType) -> None:
        hook.remove()
        with collecting_seldom():
            load(module)

    hook = ImportAround(library, around)
    if library not in sys.modules:
        hook.install()
