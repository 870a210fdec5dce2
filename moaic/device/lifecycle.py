"""Start of the device, once per process, at its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from moaic.device.identity import IN_USE


class Lifecycle:
    """Starts the device by a function that `registration` sets, so that low layers need not import high ones."""

    def __init__(self) -> None:
        self._starting = threading.RLock()
        self._start: Callable[[], None] | None = None

    def set_start(self, start: Callable[[], None]) -> None:
        """Set the function that the first use calls."""
        self._start = start

    def ensure_started(self) -> None:
        """Start the device if it has not been started."""
        if IN_USE.is_set():
            return
        with self._starting:
            if not IN_USE.is_set():
                assert self._start is not None, "device moai is not registered"
                self._start()
                IN_USE.set()


LIFECYCLE: Final = Lifecycle()
