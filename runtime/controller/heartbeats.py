"""The heartbeats of the workers, by which a waiting controller finds processes that live and do not go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from moaic.runtime.launch.channel import Workers

BEAT_SECONDS: Final = 1.0
"""Interval at which a waiting controller checks the heartbeats of the workers."""

MISSED_BEATS: Final = 15
"""Missed heartbeats after which a worker counts as stuck.

A thread of the worker beats every second, and no computation delays it for long. The controller counts its own checks,
not time, so that a suspended controller counts no misses.
"""

STOPPED_BEATS: Final = 2
"""Missed heartbeats for a process that a signal has suspended: load does not explain these."""


class Heartbeats:
    """The number of heartbeats of each worker at the last check, and of checks since that found no other."""

    def __init__(self, workers: Workers[Tensor]) -> None:
        self._workers = workers
        self._known = [(0, 0)] * len(workers.devices)

    def missed(self) -> Iterator[tuple[int, int]]:
        """The rank of each stuck worker, and the checks that it missed; one that has not begun to beat is not stuck."""
        for rank in range(len(self._known)):
            beats = self._workers.status.beats(rank)
            known, missed = self._known[rank]
            self._known[rank] = (beats, missed + 1) if beats == known and beats else (beats, 0)
            if missed >= MISSED_BEATS or (missed >= STOPPED_BEATS and self._workers.is_stopped(rank)):
                yield rank, missed + 1
