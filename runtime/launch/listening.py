"""Where workers wait for those of other hosts."""

from __future__ import annotations

import socket
from collections.abc import Generator
from contextlib import contextmanager

from moaic.ir.errors import Diagnostic


def listen(address: str, workers: int) -> tuple[socket.socket, ...]:
    """Sockets on which workers wait for links from those of other hosts. Raises Diagnostic."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return tuple(socket.create_server((address, 0), family=family, backlog=64) for _ in range(workers))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise Diagnostic(
            f"workers cannot listen on {address}: {reason or error}",
            hint="the address of a [[host]] in cluster.toml must be one of that host's own",
        ) from None


@contextmanager
def closed_after(listeners: tuple[socket.socket, ...]) -> Generator[tuple[socket.socket, ...]]:
    """Close these sockets, which workers have by then if they were started."""
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()
