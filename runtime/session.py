"""The process-wide accelerator: made when it is first needed, ended with the process."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.accelerator import Accelerator
from moaic.runtime.launch import launch
from moaic.runtime.threads import default_flavor


class Session:
    """Holds the accelerator of this process, and how many workers it is to have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._accelerator: Accelerator | None = None
        self._flavor: int | None = None
        self._is_forked = False

    def accelerator(self) -> Accelerator:
        """The accelerator; workers start with the first call. Raises Diagnostic in a forked child."""
        if self._is_forked:
            raise Diagnostic(
                "this process was forked from one that uses the accelerator, whose workers are the parent's alone",
                hint="use the accelerator in the main process, and plain CPU tensors in loader processes",
            )
        with self._lock:
            if self._accelerator is None:
                self._accelerator = Accelerator(launch(self.flavor()))
                atexit.register(self.close)
                os.register_at_fork(after_in_child=self._forked)
            return self._accelerator

    def is_running(self) -> bool:
        return self._accelerator is not None

    def flavor(self) -> int:
        """Number of workers that there are, or would be."""
        if self._accelerator is not None:
            return self._accelerator.flavor
        return default_flavor(os.environ) if self._flavor is None else self._flavor

    def set_flavor(self, workers: int) -> None:
        """Chooses the number of workers, before there are any. Raises Diagnostic."""
        if workers < 1:
            raise Diagnostic(f"the accelerator needs at least one worker, not {workers}")
        if self._accelerator is not None and workers != self._accelerator.flavor:
            raise Diagnostic(
                f"the accelerator already runs with {self._accelerator.flavor} workers",
                hint="call torch.moai.set_flavor before the device is first used, or set MOAI_FLAVOR",
            )
        self._flavor = workers

    def close(self) -> None:
        """Ends the workers, if there are any; tensors of the device are lost."""
        if self._accelerator is not None and not self._is_forked:
            self._accelerator.close()

    def _forked(self) -> None:
        self._lock = threading.Lock()
        if self._accelerator is not None:
            self._is_forked = True
            self._accelerator.abandon()


SESSION: Final = Session()


def accelerator() -> Accelerator:
    """The accelerator of this process; workers start with the first call."""
    return SESSION.accelerator()
