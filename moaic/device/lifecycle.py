"""The device's one start in a process: when the program first uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from moaic.device.identity import IN_USE


class Lifecycle:
    """How the device starts is said by `registration`, which knows everything; whoever needs a started device asks."""

    def __init__(self) -> None:
        self._starting = threading.RLock()
        self._start: Callable[[], None] | None = None

    def start_by(self, start: Callable[[], None]) -> None:
        """From now on the first use calls `start`."""
        self._start = start

    def ensure_started(self) -> None:
        """Returns once the device can compute."""
        if IN_USE.is_set():
            return
        with self._starting:
            if not IN_USE.is_set():
                assert self._start is not None, "device moai is not registered"
                self._start()
                IN_USE.set()


LIFECYCLE: Final = Lifecycle()
