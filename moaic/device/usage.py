"""How much the accelerator holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from moaic.runtime.controller import session


class Peak:
    """The largest sum of all workers' buffers that was seen when somebody asked: all that is known of CPU workers."""

    def __init__(self) -> None:
        self.bytes = 0


_PEAK: Final = Peak()


def memory_stats() -> OrderedDict[str, Any]:
    """Buffers of all workers together, once they have done all that was asked for; in bytes."""
    workers = session.accelerator().stats().workers
    current, counted = (sum(each) for each in zip(*((worker.bytes, worker.peak) for worker in workers), strict=True))
    _PEAK.bytes = max(_PEAK.bytes, current, counted)
    return OrderedDict(
        {
            "active.all.current": sum(worker.buffers for worker in workers),
            "allocated_bytes.all.current": current,
            "allocated_bytes.all.peak": _PEAK.bytes,
            "pss_bytes.all.current": sum(worker.pss for worker in workers),
        }
    )


def reset_peak() -> None:
    """Forget the largest value seen."""
    _PEAK.bytes = 0
    session.accelerator().stats(forget_peak=True)
