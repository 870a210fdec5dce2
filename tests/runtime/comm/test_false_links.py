"""Ends of every kind at the port of a worker: none stops it, and none writes but where its slots and its words are."""

from __future__ import annotations

import os
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from moaic.runtime.comm.peer_links import GREETING, HEAD, MAGIC, WORD, PeerLinks
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.host.status import FAILED, WORDS
from moaic.runtime.launch.identity import Authority, client_context
from moaic.runtime.protocol.peers import PeerAddress, Peers
from moaic.runtime.protocol.shared_memory import SLOT_BYTES, SLOTS, create_memory, memory_bytes
from moaic.runtime.protocol.tls import TlsStream
from tests.runtime.mutations import Mutator, hangs_up, hello

MOST_BYTES = 128 << 20

AUTHORITY = Authority("test")

MINE, THEIRS = (AUTHORITY.credentials(name) for name in ("host/a", "host/b"))

CONTEXT = client_context(THEIRS)

GREETED = GREETING.pack(MAGIC, 1, 0)

SLOTS_OF_1 = memory_bytes(2) - SLOTS * SLOT_BYTES
"""Where the slots of worker 1 begin."""

WRITES = (
    HEAD.pack(1, 0, 0) + WORD.pack(WORDS + FAILED, 1),
    HEAD.pack(1, 64, SLOTS_OF_1) + WORD.pack(WORDS + FAILED, 0) + b"x" * 64,
)


class Port:
    """The links of worker 0, to which worker 1 of another host belongs."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        addresses = (PeerAddress(*self.address, MINE.name), PeerAddress("127.0.0.1", 1, THEIRS.name))
        peers = Peers(addresses, 0, 1, MINE.certificate, MINE.key, MINE.authority)
        memory = create_memory(2)
        self.links = PeerLinks(0, peers, listener)
        self.box = Mailbox(memory, 0, 2, (), links=self.links)
        os.close(memory)

    def link(self, words: bytes) -> socket.socket:
        """A link that has the certificate of worker 1's host, and says this."""
        sock = socket.create_connection(self.address)
        stream = TlsStream(sock, CONTEXT, is_server=False)
        stream.shake_hands()
        with suppress(OSError):
            stream.sendmsg([memoryview(words)])
        return sock


@pytest.fixture
def threads() -> Iterator[None]:
    """Fails if threads are left."""
    before = threading.active_count()
    yield
    until = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def fuzz(seed: int, strangers: int, links: int) -> None:
    mutator, first, port = Mutator(seed), hello(CONTEXT), Port()
    tracemalloc.start()
    for _ in range(strangers):
        with socket.create_connection(port.address) as sock:
            with suppress(OSError):
                sock.sendall(mutator.bytes(first))
            assert hangs_up(sock)
    assert not port.links.lost
    for _ in range(links):
        said = GREETED if mutator.random.random() < 0.8 else mutator.bytes(GREETED)
        said += b"".join(mutator.bytes(mutator.random.choice(WRITES)) for _ in range(mutator.random.randrange(4)))
        assert hangs_up(port.link(said))
        if port.links.lost:
            port.links.close()
            port = Port()
    port.links.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak:,} bytes"


@pytest.mark.usefixtures("threads")
@pytest.mark.timeout(60)
def test_no_end_does_more_than_be_cut() -> None:
    fuzz(seed=0, strangers=400, links=120)


@pytest.mark.exact
@pytest.mark.usefixtures("threads")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_end_of_many_does_more_than_be_cut(seed: int) -> None:
    fuzz(seed, strangers=10_000, links=2000)
