"""How far slow work has come: on one line of the terminal, which is gone afterwards. Nothing where there is none."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

from moaic.runtime.host.status import IDLE
from moaic.runtime.protocol.commands import Code

CLEAR: Final = "\r\x1b[2K"

WIDTH: Final = 30
"""Characters of a bar."""

REDRAW_SECONDS: Final = 0.1

WAITS: Final[Mapping[int, str]] = {
    IDLE.code: "Starting",
    Code.LOAD: "Compiling",
    Code.PUT: "Loading",
    Code.RESTORE: "Loading",
    Code.STORE: "Saving",
}
"""What workers do that people wait for."""


class ProgressLine:
    """The last line of a terminal, written over again and again."""

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream = stream
        self._title = title
        self._drawn = 0.0
        self._draw("...")

    def show(self, done: int, total: int) -> None:
        """So much is done of all; drawn now and then."""
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
    """A line for the time of the block; None where nobody would see it."""
    if not is_seen():
        yield None
        return
    line = ProgressLine(sys.stderr, title)
    try:
        yield line
    finally:
        line.clear()


def is_seen() -> bool:
    """Whether standard error is a terminal, and the log is not turned down."""
    return sys.stderr.isatty() and logging.getLogger("moaic").isEnabledFor(logging.INFO)


def waiting(codes: Sequence[int]) -> None:
    """Says what workers do that somebody waits for, by the kinds of their commands; none once nobody waits."""
    if not is_seen():
        return
    busy = [WAITS[code] for code in codes if code in WAITS]
    text = f"{busy[0]} on {len(busy)} of {len(codes)} workers..." if busy else ""
    sys.stderr.write(f"{CLEAR}{text}")
    sys.stderr.flush()
