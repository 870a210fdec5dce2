"""Links of a worker to those of other hosts: what it writes for them into shared memory is written there, too.

A link is a TLS connection in one direction, made at the first write. A message has words (address and value each), and
bytes for a slot, which are stored before the words: a worker that has seen a word finds the bytes. A thread per link
receives, and never waits for the worker, so that two that send to each other do not stop each other.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from moaic.runtime.launch.identity import Credentials, client_context, peer_name, server_context
from moaic.runtime.launch.time_limit import cut_after, shut
from moaic.runtime.protocol.peers import Peers
from moaic.runtime.protocol.tls import TlsStream, tune

GREETING: Final = struct.Struct("<8sII")
"""Magic, ranks of the sender and of the receiver."""

MAGIC: Final = b"moaiclnk"

HEAD: Final = struct.Struct("<IIQ")
"""Number of words, bytes, and the place of the bytes in the memory."""

WORD: Final = struct.Struct("<Qq")

NOTHING: Final = memoryview(b"")

MOST_WORDS: Final = 64

DIAL_SECONDS: Final = 30.0

HANDSHAKE_SECONDS: Final = 10.0

PENDING: Final = 64
"""Connections of which nobody knows yet who they are."""

RETRY_SECONDS: Final = 0.1


class Unreachable(Exception):
    """A worker of another host cannot be connected to; the text says which, where and why."""


class BadLink(Exception):
    """What came over a link was not for this worker's memory."""


Store = Callable[[int, Sequence[tuple[int, int]]], None]
"""Takes the rank of a sender and the words it has written."""

Place = Callable[[int, int, int], memoryview]
"""The memory for bytes of a sender, by its rank, the place and the number of bytes. Raises BadLink."""


class PeerLinks:
    """All links of one worker."""

    def __init__(self, rank: int, peers: Peers, listener: socket.socket) -> None:
        self.rank = rank
        self.far: Final = frozenset(range(len(peers.addresses))).difference(peers.local)
        self.lost = ""
        """Which link has ended; empty while none has."""
        self.sent = 0
        """Bytes sent, before encryption."""
        self._peers = peers
        self._credentials = Credentials(peers.addresses[rank].name, peers.certificate, peers.key, peers.authority)
        self._out: dict[int, TlsStream] = {}
        self._in: set[int] = set()
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []
        """Of those who have not shown yet who they are, the oldest first."""
        self._is_closed = False
        self._listener = listener

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each worker."""
        return tuple(address.name for address in self._peers.addresses)

    def listen(self, place: Place, store: Store) -> None:
        """Accept the links of others, on threads of their own, and receive what comes over them."""
        threading.Thread(target=self._accept, args=(place, store), name="links", daemon=True).start()

    def write(self, peer: int, words: Sequence[tuple[int, int]], at: int = 0, data: memoryview = NOTHING) -> None:
        """Write bytes, then words, into the memory of a peer's host. Raises Unreachable; OSError for an ended link.

        The bytes must not change until the peer says that it has read them.
        """
        stream = self._out.get(peer) or self._dial(peer)
        head = HEAD.pack(len(words), len(data), at) + b"".join(WORD.pack(*word) for word in words)
        stream.send_all([memoryview(head), data] if data else [memoryview(head)])
        self.sent += len(head) + len(data)

    def write_all(self, words: Sequence[tuple[int, int]]) -> None:
        """Write words for each peer to which there is a link already, as far as these still work."""
        for peer in list(self._out):
            try:
                self.write(peer, words)
            except OSError:
                continue

    def close(self) -> None:
        """Listen no more, and end the links to others."""
        self._is_closed = True
        shut(self._listener, socket.SHUT_RDWR)
        for stream in self._out.values():
            stream.close()

    def _accept(self, place: Place, store: Store) -> None:
        """Accept until all workers of other hosts have come."""
        context = server_context(self._credentials, requires=True)
        while len(self._in) < len(self.far) and not self._is_closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Out of descriptors, or the other end has gone already.
                if not self._is_closed:
                    time.sleep(RETRY_SECONDS)
                continue
            with self._lock:
                self._strangers.append(sock)
                # One that belongs here takes milliseconds, so it is not among the oldest.
                for oldest in self._strangers[:-PENDING]:
                    shut(oldest, socket.SHUT_RDWR)
            arguments = (TlsStream(sock, context, is_server=True), sock, place, store)
            threading.Thread(target=self._welcome, args=arguments, name="link", daemon=True).start()
        self._listener.close()

    def _dial(self, peer: int) -> TlsStream:
        to = self._peers.addresses[peer]
        try:
            sock = socket.create_connection((to.address, to.port), DIAL_SECONDS)
        except OSError as error:
            raise self._unreachable(peer, error) from error
        try:
            tune(sock)
            stream = TlsStream(sock, client_context(self._credentials), is_server=False)
            stream.shake_hands()
            sock.settimeout(None)
        except OSError as error:
            sock.close()
            raise self._unreachable(peer, error) from error
        if peer_name(stream) != to.name:
            stream.close()
            raise Unreachable(f"{to.address}:{to.port} is not worker {peer}: its certificate says {peer_name(stream)}")
        stream.send_all([memoryview(GREETING.pack(MAGIC, self.rank, peer))])
        self._out[peer] = stream
        return stream

    def _unreachable(self, peer: int, error: OSError) -> Unreachable:
        to = self._peers.addresses[peer]
        where = f"{self._name(peer)} at {to.address}:{to.port}"
        return Unreachable(f"{where} cannot be reached: {error}; firewalls must let workers connect")

    def _name(self, peer: int) -> str:
        """A worker with its host: `worker 1 (node2)`."""
        return f"worker {peer} ({self._peers.addresses[peer].name.removeprefix('host/')})"

    def _welcome(self, stream: TlsStream, sock: socket.socket, place: Place, store: Store) -> None:
        """Receive over a link from its first byte to its end."""
        try:
            with cut_after(sock, HANDSHAKE_SECONDS, socket.SHUT_RDWR):
                tune(sock)
                stream.shake_hands()
                sender = self._sender(stream)
        except (OSError, BadLink):
            # Whoever it is does not belong here, and learns no more.
            stream.close()
            return
        finally:
            with self._lock:
                self._strangers.remove(sock)
        try:
            while _receive(stream, sender, place, store):
                pass
            self.lost = self.lost or f"{self._name(sender)} has ended"
        except (OSError, BadLink) as error:
            self.lost = self.lost or f"the link of {self._name(sender)} has ended: {error}"
        finally:
            stream.close()

    def _sender(self, stream: TlsStream) -> int:
        """The rank of the worker at the other end. Raises BadLink for one that is not who it says."""
        greeting = bytearray(GREETING.size)
        stream.fill(memoryview(greeting))
        magic, sender, receiver = GREETING.unpack(greeting)
        is_known = magic == MAGIC and receiver == self.rank and sender in self.far
        if not is_known or peer_name(stream) != self._peers.addresses[sender].name:
            raise BadLink("a link of nobody that is known")
        with self._lock:
            if sender in self._in:
                raise BadLink("a second link of the same worker")
            self._in.add(sender)
        if len(self._in) == len(self.far):
            # This ends `accept`: nobody else may come.
            shut(self._listener, socket.SHUT_RDWR)
        return sender


def _receive(stream: TlsStream, sender: int, place: Place, store: Store) -> bool:
    """Receive and store one message; false at the end of the link."""
    head = bytearray(HEAD.size)
    if stream.recvmsg_into([memoryview(head)])[0] == 0:
        return False
    # The end in the middle of a head is found by the next read.
    count, nbytes, at = HEAD.unpack(head)
    if not 1 <= count <= MOST_WORDS:
        raise BadLink(f"a message of {count} words")
    packed = bytearray(count * WORD.size)
    stream.fill(memoryview(packed))
    words = list(WORD.iter_unpack(packed))
    if nbytes:
        stream.fill(place(sender, at, nbytes))
    store(sender, words)
    return True
