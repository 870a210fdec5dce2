"""Ctrl-C where an exception must not begin: in the middle of a message, under C++ code that allows none."""

from __future__ import annotations

# Its wrapper, the module `signal`, converts handlers to enums, which takes 17 us for a block instead of 1.7.
import _signal  # pyright: ignore[reportMissingImports]
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

signals: Any = _signal


@contextmanager
def uninterrupted(*, once: bool = False) -> Generator[None]:
    """Defer Python's handler of SIGINT, so that it does not interrupt the body; with `once` a second signal does."""
    handler: Any = signals.getsignal(signals.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def defer(number: int, at: FrameType | None) -> None:
        caught.append((number, at))
        if once and len(caught) > 1:
            handler(number, at)

    signals.signal(signals.SIGINT, defer)
    try:
        yield
    finally:
        signals.signal(signals.SIGINT, handler)
        if caught:
            handler(*caught[-1])
