"""Links between hosts as their workers will have them, tried before there are workers: by the same ports and TLS."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Final

from moaic.runtime.launch.identity import Credentials, client_context, peer_name, server_context
from moaic.runtime.protocol.host_messages import MeasuredLink
from moaic.runtime.protocol.peers import PeerAddress
from moaic.runtime.protocol.tls import CHUNK, TlsStream, tune

DIAL_SECONDS: Final = 5.0

SILENT_SECONDS: Final = 10.0
"""Time without a byte after which a link counts as broken."""

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
        threading.Thread(target=self._accept, name="probe", daemon=True).start()

    def measure(self, to: PeerAddress) -> MeasuredLink:
        """Connect to another host and send it larger and larger messages."""
        try:
            stream = self._dial(to)
        except OSError as error:
            return _broken(str(error.strerror or error))
        try:
            name = peer_name(stream)
            return _measured(stream) if name == to.name else _broken(f"another host answers there: {name}")
        except OSError as error:
            return _broken(f"the connection has ended: {error.strerror or error}")
        finally:
            stream.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # This ends `accept`.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _dial(self, to: PeerAddress) -> TlsStream:
        sock = socket.create_connection((to.address, to.port), DIAL_SECONDS)
        stream = TlsStream(sock, client_context(self._credentials), is_server=False)
        try:
            tune(sock)
            stream.shake_hands()
            sock.settimeout(SILENT_SECONDS)
        except OSError:
            stream.close()
            raise
        return stream

    def _accept(self) -> None:
        """Serve one host after the other: no two of a check dial the same one at once."""
        context = server_context(self._credentials, requires=True)
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            sock.settimeout(DIAL_SECONDS)
            stream = TlsStream(sock, context, is_server=True)
            # Who does not belong here learns nothing; who does says itself that its link has ended.
            with contextlib.suppress(OSError):
                tune(sock)
                stream.shake_hands()
                sock.settimeout(SILENT_SECONDS)
                _confirm_all(stream)
            stream.close()


def _broken(error: str) -> MeasuredLink:
    return MeasuredLink(0.0, 0.0, error)


def _measured(stream: TlsStream) -> MeasuredLink:
    round_trip = min(_seconds(stream, 1) for _ in range(PINGS))
    size = LEAST_BYTES
    while (spent := _seconds(stream, size)) < ENOUGH_SECONDS and size < MOST_BYTES:
        size *= 4
    return MeasuredLink(round_trip, size / spent, "")


def _seconds(stream: TlsStream, size: int) -> float:
    """Time from the first byte of a message until it is confirmed."""
    begin = time.perf_counter()
    _send(stream, SIZE.pack(size))
    data = bytes(min(size, CHUNK))
    for start in range(0, size, CHUNK):
        _send(stream, memoryview(data)[: size - start])
    _fill(stream, bytearray(len(CONFIRMED)))
    return time.perf_counter() - begin


def _confirm_all(stream: TlsStream) -> None:
    """Receive and confirm messages until the stream ends, which raises ConnectionError."""
    data, head = memoryview(bytearray(CHUNK)), bytearray(SIZE.size)
    while True:
        _fill(stream, head)
        (size,) = SIZE.unpack(head)
        for start in range(0, size, CHUNK):
            _fill(stream, data[: size - start])
        _send(stream, CONFIRMED)


def _send(stream: TlsStream, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[stream.sendmsg([left]) :]


def _fill(stream: TlsStream, target: bytearray | memoryview) -> None:
    if stream.recvmsg_into([memoryview(target)])[0] < len(target):
        raise ConnectionError("it ended within a message")
