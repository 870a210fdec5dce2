"""Progress of slow work: a line of the terminal, cleared afterwards; without a terminal a log line now and then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TextIO

from moaic.runtime.host.status import IDLE
from moaic.runtime.protocol.commands import CODES, Adopt, Load, Put, Restore, Store

CLEAR: Final = "\r\x1b[2K"

WIDTH: Final = 30
"""Characters of a bar."""

REDRAW_SECONDS: Final = 0.1

SIGN_SECONDS: Final = 5.0
"""Time between two log lines about work that goes on."""

LOGGER = logging.getLogger("moaic")

WAITS: Final[Mapping[int, str]] = {
    IDLE.code: "Starting",
    CODES[Load]: "Compiling",
    CODES[Adopt]: "Compiling",
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
    """A line for the time of the block; None without a terminal."""
    if not is_visible():
        with _signs_of_life(title):
            yield None
        return
    line = ProgressLine(sys.stderr, title)
    try:
        yield line
    finally:
        line.clear()


@contextmanager
def _signs_of_life(title: str) -> Generator[None]:
    """Logs every SIGN_SECONDS that the block is still at work."""
    over, began = threading.Event(), time.monotonic()

    def work() -> None:
        while not over.wait(SIGN_SECONDS):
            LOGGER.info("%s for %.0f s so far.", title, time.monotonic() - began)

    threading.Thread(target=work, name="signs of life", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def is_visible() -> bool:
    """Whether standard error is a terminal, and the log is not turned down."""
    return sys.stderr.isatty() and LOGGER.isEnabledFor(logging.INFO)


class Waits:
    """Shows the slow commands that workers are busy with while the program waits for them."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._said = 0.0

    def __call__(self, codes: Sequence[int]) -> None:
        """`codes` are those of the workers' commands; none, at the end of a wait, clear the line."""
        busy = [WAITS[code] for code in codes if code in WAITS]
        text = f"{busy[0]} on {len(busy)} of {len(codes)} workers" if busy else ""
        if is_visible():
            sys.stderr.write(f"{CLEAR}{text}{'...' if text else ''}")
            sys.stderr.flush()
        else:
            self._log(text)

    def _log(self, text: str) -> None:
        now = time.monotonic()
        if not text:
            self._began = None
        elif self._began is None:
            self._began = self._said = now
        elif now - self._said >= SIGN_SECONDS:
            self._said = now
            LOGGER.info("%s for %.0f s so far.", text, now - self._began)
