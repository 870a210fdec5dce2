"""TLS over a connected socket, with the calls of a socket that `frames.Connection` uses.

`ssl.SSLSocket` takes one piece per call and returns 16 KiB of them; here a call encrypts and decrypts whole lists of
pieces in memory. An object is for one thread at a time, in both directions.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from typing import Any, Final, cast

CHUNK: Final = 1 << 19
"""Bytes that are encrypted, and received, by one system call."""

JOINED: Final = 1 << 14
"""Bytes of a TLS record: smaller pieces are joined, to fill one."""

HEADER: Final = 5
"""Bytes before the body of a record; the last two are its length."""

SILENCE_MILLISECONDS: Final = 10_000
"""Time after which a host that confirms nothing of what is sent to it counts as gone."""

LEAST_TRIES: Final = 3
"""How often it must have been sent again before."""

TCP_INFO: Final = struct.Struct("=xxBB52xI")
"""Of `struct tcp_info` in <linux/tcp.h>: retransmits, probes of a window of zero, milliseconds since the last ACK."""


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and find within about ten seconds that the other host is gone.

    This finds it of a connection on which nothing is sent; of others `TlsStream.is_unanswered` tells. Linux's own
    TCP_USER_TIMEOUT also ends those to a program that does not read for a while, in a debugger for example.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class TlsStream:
    """One end of an encrypted stream. Raises OSError where a socket does; BlockingIOError if it would have to wait."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> None:
        """Begins nothing: `shake_hands` does, while the socket still blocks."""
        self._socket = sock
        self._is_server = is_server
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
        self._unsent = memoryview(b"")
        """Encrypted bytes that the socket has not taken yet."""
        self._encrypted = 0
        """Bytes given to `sendmsg` of which `_unsent` is the rest; the caller gives them again."""
        self._received = bytearray(JOINED)
        """Where encrypted bytes are received; small until it was full once, as strangers get one each."""
        self._body = 0
        """During the handshake, the bytes that follow the header of a record."""

    def shake_hands(self) -> None:
        """Agree on keys; the socket waits as long as its timeout says. Raises OSError, of which ssl.SSLError is one.

        A client learns from no alert why it is refused: what strangers see does not differ by the cause.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._fetch_handshake()
            except ssl.SSLError:
                if not self._is_server:
                    self._flush()
                raise
            else:
                self._flush()
                return

    def certificate(self) -> dict[str, Any] | None:
        """The verified certificate of the other end, in the form of `ssl`; None if it has shown none."""
        found: Any = self._tls.getpeercert()
        return found or None

    def certificate_bytes(self) -> bytes | None:
        """The certificate of the other end, verified or not, in DER."""
        return self._tls.getpeercert(binary_form=True)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_unanswered(self) -> bool:
        """Whether the other host has confirmed nothing for a while, however often it was asked."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
        except OSError:
            return True
        retransmits, probes, silence = TCP_INFO.unpack(info)
        return max(retransmits, probes) >= LEAST_TRIES and silence > SILENCE_MILLISECONDS

    def setblocking(self, flag: bool) -> None:
        self._socket.setblocking(flag)

    def sendmsg(self, pieces: Sequence[memoryview]) -> int:
        """Send some of the bytes; returns their number, once the socket has taken all that they became."""
        if not self._encrypted:
            self._encrypted = self._encrypt(pieces)
        self._flush()
        sent, self._encrypted = self._encrypted, 0
        return sent

    def recvmsg_into(self, targets: Sequence[memoryview]) -> tuple[int, None]:
        """Fill the targets in order; returns the number of bytes, 0 at the end of the stream.

        Less than all is returned only when the socket has no more for now.
        """
        filled = 0
        for target in targets:
            at = 0
            while at < len(target):
                count = self._read(target[at:], is_first=not filled)
                if count == 0:
                    return filled, None
                at, filled = at + count, filled + count
        return filled, None

    def send_all(self, pieces: Sequence[memoryview]) -> None:
        """Send all of the bytes; the socket waits."""
        left = list(pieces)
        while left:
            sent = self.sendmsg(left)
            while left and sent >= len(left[0]):
                sent -= len(left.pop(0))
            if sent:
                left[0] = left[0][sent:]

    def fill(self, target: memoryview) -> None:
        """Receive as many bytes as the target has; the socket waits. Raises ConnectionError for an end before them."""
        if self.recvmsg_into([target])[0] < len(target):
            raise ConnectionError("it ended within a message")

    def close(self) -> None:
        self._socket.close()

    def _encrypt(self, pieces: Sequence[memoryview]) -> int:
        together = sum(piece.nbytes for piece in pieces)
        if together < JOINED:
            self._write(memoryview(b"".join(pieces)))
            return together
        taken, small = 0, bytearray()
        for piece in pieces:
            if taken >= CHUNK:
                break
            part = piece.cast("B")[: CHUNK - taken] if piece.nbytes else piece
            taken += len(part)
            if len(part) < JOINED:
                small += part
                continue
            self._write(memoryview(small))
            small = bytearray()
            self._write(part)
        self._write(memoryview(small))
        return taken

    def _write(self, data: memoryview) -> None:
        """Encrypt all: one call may take less than it is given."""
        while data:
            data = data[self._tls.write(data) :]

    def _flush(self) -> None:
        while self._unsent or self._leaving.pending:
            self._unsent = self._unsent or memoryview(self._leaving.read())
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _read(self, target: memoryview, *, is_first: bool) -> int:
        """Decrypt into the target; 0 at the end, and, if bytes have been read already, when there are none for now."""
        while True:
            try:
                # The stubs of `ssl` know the form that returns bytes alone.
                return cast("int", self._tls.read(len(target), target))
            except ssl.SSLWantReadError:
                pass
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            try:
                self._fetch()
            except OSError:
                # Of an end by an error, the next call tells: these bytes came before it.
                if is_first:
                    raise
                return 0

    def _fetch(self) -> None:
        """Receive what the socket has."""
        count = self._socket.recv_into(self._received)
        if count == 0:
            self._arrived.write_eof()
            return
        self._arrived.write(memoryview(self._received)[:count])
        if count == len(self._received) < CHUNK:
            self._received = bytearray(CHUNK)

    def _fetch_handshake(self) -> None:
        """Receive the header of a record, or its body, and nothing behind it.

        The first message may come right behind the handshake. It must stay in the socket, where a poll sees it. A wrong
        header ends the handshake before its body is waited for.
        """
        wanted = self._body or HEADER
        data = bytearray()
        while len(data) < wanted:
            part = self._socket.recv(wanted - len(data))
            if not part:
                self._arrived.write_eof()
                return
            data += part
        self._arrived.write(data)
        self._body = 0 if self._body else int.from_bytes(data[3:], "big")
