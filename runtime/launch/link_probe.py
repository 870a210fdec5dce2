"""Links between hosts as their workers will have them, tried before there are workers: by the same ports and TLS."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Final

from moaic.runtime.launch.identity import Credentials, client_context, peer_name, server_context
from moaic.runtime.launch.time_limit import cut_after, shut
from moaic.runtime.protocol.host_messages import MeasuredLink
from moaic.runtime.protocol.peers import PeerAddress
from moaic.runtime.protocol.tls import CHUNK, TlsStream, tune

DIAL_SECONDS: Final = 5.0
"""Time to connect, and again to show who one is."""

MEASURE_SECONDS: Final = 15.0
"""Time that a measurement may take in all."""

MOST_LINKS: Final = 64
"""Connections to one host at a time; a check itself makes one."""

NO_DESCRIPTOR_SECONDS: Final = 0.1
"""Pause where the system has none for another connection."""

SIZE: Final = struct.Struct("<Q")
"""The head of a message: the number of its bytes."""

CONFIRMED: Final = b"\1"

PINGS: Final = 20
"""Messages of one byte, of which the fastest is the round trip."""

LEAST_BYTES: Final = 1 << 18

MOST_BYTES: Final = 1 << 26

ENOUGH_SECONDS: Final = 0.2
"""A message that takes so long says what the link can do."""


class LinkProbe:
    """One host's end: confirms what other hosts send, and measures how this one reaches them."""

    def __init__(self, listener: socket.socket, credentials: Credentials) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._credentials = credentials
        self._context = server_context(credentials, requires=True)
        self._free = threading.Semaphore(MOST_LINKS)
        self._is_closed = False
        threading.Thread(target=self._accept, name="probe", daemon=True).start()

    def measure(self, to: PeerAddress) -> MeasuredLink:
        """Connect to another host and send it larger and larger messages, for at most `MEASURE_SECONDS`."""
        until = time.monotonic() + MEASURE_SECONDS
        try:
            sock = socket.create_connection((to.address, to.port), DIAL_SECONDS)
        except OSError as error:
            return _broken(_words(error))
        with sock, cut_after(sock, until - time.monotonic(), socket.SHUT_RDWR) as cut:
            try:
                return self._reached(sock, to.name)
            except OSError as error:
                late = f"it could not be measured within {MEASURE_SECONDS:g} s"
                return _broken(late if cut.is_set() else f"the connection has ended: {_words(error)}")

    def close(self) -> None:
        """Listen no more; who is connected is confirmed to the end."""
        self._is_closed = True
        # This ends `accept`.
        shut(self._listener, socket.SHUT_RDWR)
        self._listener.close()

    def _reached(self, sock: socket.socket, name: str) -> MeasuredLink:
        """The link by a new connection to the host that is expected there. Raises OSError."""
        stream = TlsStream(sock, client_context(self._credentials), is_server=False)
        tune(sock)
        stream.shake_hands()
        sock.settimeout(None)
        found = peer_name(stream)
        return _measured(stream) if found == name else _broken(f"another host answers there: {found}")

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(NO_DESCRIPTOR_SECONDS)
                continue
            if self._free.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(sock,), name="probe link", daemon=True).start()
            else:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        """Confirm what a host sends, for longer than a measurement may take: its own end says that it took too long."""
        try:
            # Who does not belong here learns nothing; who does says itself that its link has ended.
            with sock, suppress(OSError), cut_after(sock, MEASURE_SECONDS + DIAL_SECONDS, socket.SHUT_RDWR):
                tune(sock)
                stream = TlsStream(sock, self._context, is_server=True)
                with cut_after(sock, DIAL_SECONDS):
                    stream.shake_hands()
                _confirm_all(stream)
        finally:
            self._free.release()


def _broken(error: str) -> MeasuredLink:
    return MeasuredLink(0.0, 0.0, error)


def _words(error: OSError) -> str:
    return str(error.strerror or error)


def _measured(stream: TlsStream) -> MeasuredLink:
    round_trip = min(_seconds(stream, 1) for _ in range(PINGS))
    size = LEAST_BYTES
    while (spent := _seconds(stream, size)) < ENOUGH_SECONDS and size < MOST_BYTES:
        size *= 4
    return MeasuredLink(round_trip, size / spent, "")


def _seconds(stream: TlsStream, size: int) -> float:
    """Time from the first byte of a message until it is confirmed."""
    begin = time.perf_counter()
    stream.send_all([memoryview(SIZE.pack(size))])
    data = bytes(min(size, CHUNK))
    for start in range(0, size, CHUNK):
        stream.send_all([memoryview(data)[: size - start]])
    stream.fill(memoryview(bytearray(len(CONFIRMED))))
    return time.perf_counter() - begin


def _confirm_all(stream: TlsStream) -> None:
    """Receive and confirm messages until the stream ends, which raises ConnectionError."""
    data, head = memoryview(bytearray(CHUNK)), memoryview(bytearray(SIZE.size))
    while True:
        stream.fill(head)
        (size,) = SIZE.unpack(head)
        for start in range(0, size, CHUNK):
            stream.fill(data[: size - start])
        stream.send_all([memoryview(CONFIRMED)])
