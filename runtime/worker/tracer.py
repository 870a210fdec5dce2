"""Spans of what a worker does, recorded only while they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from moaic.runtime.protocol.span import TraceSpan


class Tracer:
    """The spans of one worker; nothing is kept while `on` is false."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """`settle` returns once all that was begun is done: on a GPU a span is to last as long as what it names."""
        self._settle = settle
        self.on = False
        self._spans: list[TraceSpan] = []
        self._open: tuple[str, str, int] | None = None

    def begin(self, name: str, kind: str) -> None:
        """What was done before has ended."""
        self.end()
        self._settle()
        self._open = name, kind, time.perf_counter_ns()

    def end(self) -> None:
        if self._open is not None:
            self._settle()
            self._spans.append(TraceSpan(*self._open, time.perf_counter_ns()))
            self._open = None

    def take(self, *, on: bool) -> list[Any]:
        """The spans since this was last asked, as plain data; from now on they are noted, or not."""
        taken, self._spans, self.on = self._spans, [], on
        return [astuple(span) for span in taken]
