"""Progress of slow work on one line of the terminal, cleared afterwards. Without a terminal nothing is written."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

from moaic.runtime.host.status import IDLE
from moaic.runtime.protocol.commands import CODES, Load, Put, Restore, Store

CLEAR: Final = "\r\x1b[2K"

WIDTH: Final = 30
"""Characters of a bar."""

REDRAW_SECONDS: Final = 0.1

WAITS: Final[Mapping[int, str]] = {
    IDLE.code: "Starting",
    CODES[Load]: "Compiling",
    CODES[Put]: "Loading",
    CODES[Restore]: "Loading",
    CODES[Store]: "Saving",
}
"""Words for the commands of workers that take long."""


class ProgressLine:
    """The last line of a terminal, overwritten at every change."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream = stream
        self._title = title
        self._drawn = 0.0
        self._draw("...")

    def show(self, done: int, total: int) -> None:
        """Draws a bar for `done` of `total`, at most once in REDRAW_SECONDS."""
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            filled = WIDTH * done // max(1, total)
            self._draw(f" [{'#' * filled}{' ' * (WIDTH - filled)}] {done}/{total}")

    def clear(self) -> None:
        self._stream.write(CLEAR)
        self._stream.flush()

    def _draw(self, text: str) -> None:
        self._drawn = time.monotonic()
        self._stream.write(f"{CLEAR}{self._title}{text}")
        self._stream.flush()


@contextmanager
def shown(title: str) -> Generator[ProgressLine | None]:
    """A line for the time of the block; None where it would not be visible."""
    if not is_visible():
        yield None
        return
    line = ProgressLine(sys.stderr, title)
    try:
        yield line
    finally:
        line.clear()


def is_visible() -> bool:
    """Whether standard error is a terminal, and the log is not turned down."""
    return sys.stderr.isatty() and logging.getLogger("moaic").isEnabledFor(logging.INFO)


def waiting(codes: Sequence[int]) -> None:
    """Shows the slow commands that workers are busy with; no codes clear the line."""
    if not is_visible():
        return
    busy = [WAITS[code] for code in codes if code in WAITS]
    text = f"{busy[0]} on {len(busy)} of {len(codes)} workers..." if busy else ""
    sys.stderr.write(f"{CLEAR}{text}")
    sys.stderr.flush()
