"""Workers started before the accelerator is used, beside the user's own start-up, and ended if they do not suit it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from typing import Final

from torch import Tensor

from moaic.runtime.controller.launch import launch
from moaic.runtime.host.flavors import Flavor
from moaic.runtime.launch.local_workers import LocalWorkers

READ_BY_WORKERS: Final = (
    *("MOAI_", "PYTHON", "LD_", "OMP_", "KMP_", "MKL_", "GOMP_", "MALLOC_", "TORCH", "PYTORCH", "TRITON_", "CUDA_"),
    *("HIP_", "ROCR_", "NCCL_", "CC", "CXX", "PATH", "HOME", "TMP", "XDG_"),
)
"""Beginnings of the names of variables that a worker, its libraries or its compilers read, some of them at import."""


@dataclass(frozen=True, slots=True)
class _Started:
    flavor: Flavor
    variables: Mapping[str, str]
    workers: LocalWorkers[Tensor]


class EarlyWorkers:
    """The workers that this process is likely to use; `take` hands them over."""

    def __init__(self) -> None:
        self._started: _Started | None = None
        self._is_watched = False

    def start(self, flavor: Flavor) -> None:
        """Start workers of this flavor and return at once; without effect in processes that another one spawned.

        These import the user's script again, and seldom use what it sets up.
        """
        if parent_process() is not None or self._suit(flavor):
            return
        self.discard()
        self._watch()
        self._started = _Started(flavor, _variables(), launch(flavor.workers, devices=flavor.devices))

    def take(self, flavor: Flavor) -> LocalWorkers[Tensor] | None:
        """The workers, if they are of this flavor and were started with the variables of now; others are ended."""
        if not self._suit(flavor):
            self.discard()
        started, self._started = self._started, None
        return None if started is None else started.workers

    def is_started(self) -> bool:
        return self._started is not None

    def discard(self) -> None:
        """End the workers, if there are any."""
        started, self._started = self._started, None
        if started is not None:
            started.workers.kill_all()

    def _suit(self, flavor: Flavor) -> bool:
        started = self._started
        return started is not None and started.flavor == flavor and started.variables == _variables()

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            atexit.register(self.discard)
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Leave the parent its workers, which end once no process has the other ends of their sockets."""
        if self._started is not None:
            for channel in self._started.workers.channels:
                channel.close()
            self._started = None


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(READ_BY_WORKERS)}
