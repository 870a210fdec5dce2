"""A limit for all that is done with a socket, where timeouts are those of single calls."""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress


@contextmanager
def cut_after(sock: socket.socket, seconds: float, how: int = socket.SHUT_RD) -> Generator[threading.Event]:
    """Set the event if the block takes longer, and let what waits for bytes of the socket see its end.

    With `SHUT_RDWR`, also what waits until the socket takes more.
    """
    cut = threading.Event()

    def act() -> None:
        cut.set()
        shut(sock, how)

    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield cut
    finally:
        timer.cancel()


def shut(sock: socket.socket, how: int = socket.SHUT_RD) -> None:
    """End what waits for the socket. By default one direction: what the other end sees is up to the thread there."""
    # An error: it was closed before.
    with suppress(OSError):
        sock.shutdown(how)
