"""Ctrl-C where an exception must not begin: in the middle of a message, under C++ code that allows none."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted(*, once: bool = False) -> Generator[None]:
    """Defer Python's handler of SIGINT, so that it does not interrupt the body; with `once` a second signal does."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def defer(number: int, at: FrameType | None) -> None:
        caught.append((number, at))
        if once and len(caught) > 1:
            handler(number, at)

    signal.signal(signal.SIGINT, defer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[-1])
