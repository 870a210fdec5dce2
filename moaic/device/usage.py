"""Memory statistics of the accelerator."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Final

from moaic.runtime.controller import session


class Peak:
    """The largest sum of all workers' buffers that a memory query has returned; CPU workers record no peak."""

    def __init__(self) -> None:
        self.bytes = 0


_PEAK: Final = Peak()


def memory_stats() -> OrderedDict[str, Any]:
    """Bytes of the buffers of all workers together, after all queued commands."""
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
    """Reset the peak."""
    _PEAK.bytes = 0
    session.accelerator().stats(forget_peak=True)
