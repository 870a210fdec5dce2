"""Spans of a trace: commands and instructions of a worker, with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

ANSWERED_SPANS: Final = 1 << 16
"""Most spans in one answer to a Trace, far below the limits of a frame; if an answer has so many, more may be left."""


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span. Begin and end are nanoseconds of `time.perf_counter_ns`, a clock that all processes of a host share."""

    name: str
    kind: str
    """`compute` or `communicate` within a program, else `command`."""
    begin: int
    end: int


def decoded(spans: Sequence[Sequence[Any]]) -> list[TraceSpan]:
    return [TraceSpan(*span) for span in spans]
