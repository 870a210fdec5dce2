"""Spans of a worker's commands and instructions, recorded only while tracing is on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from moaic.runtime.protocol.span import ANSWERED_SPANS, TraceSpan


class Tracer:
    """The spans of one worker; it records none while `on` is false."""

    def __init__(self, synchronize: Callable[[], None]) -> None:
        """`synchronize` waits for the device, so that a span covers the execution of kernels, not their launch."""
        self._synchronize = synchronize
        self.on = False
        self._spans: list[TraceSpan] = []
        self._open: tuple[str, str, int] | None = None

    def begin(self, name: str, kind: str) -> None:
        """Open a span, after closing the one that is open."""
        self.end()
        self._synchronize()
        self._open = name, kind, time.perf_counter_ns()

    def end(self) -> None:
        if self._open is not None:
            self._synchronize()
            self._spans.append(TraceSpan(*self._open, time.perf_counter_ns()))
            self._open = None

    def take(self, *, on: bool) -> list[Any]:
        """Return the oldest spans that were not returned yet, as plain data; turn tracing on or off."""
        taken, self._spans, self.on = self._spans[:ANSWERED_SPANS], self._spans[ANSWERED_SPANS:], on
        return [astuple(span) for span in taken]
