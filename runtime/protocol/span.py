"""What a worker did, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One thing done. Begin and end are nanoseconds of `time.perf_counter_ns`, which all processes of a host share."""

    name: str
    kind: str
    """`compute` or `communicate` in a program, `command` outside."""
    begin: int
    end: int


def decoded(spans: Sequence[Sequence[Any]]) -> list[TraceSpan]:
    return [TraceSpan(*span) for span in spans]
