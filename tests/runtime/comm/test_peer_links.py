"""Links between workers of two hosts, which are two mailboxes of this process; and ends that do not belong there."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch

from moaic.runtime.comm import peer_links
from moaic.runtime.comm.peer_links import GREETING, HEAD, MAGIC, WORD, PeerLinks, Unreachable
from moaic.runtime.comm.shm_slots import PeerLost
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import Group, SubAxis, Transport
from moaic.runtime.host.status import FAILED, WORDS
from moaic.runtime.launch.identity import Authority, Credentials, client_context
from moaic.runtime.protocol.frames import readable
from moaic.runtime.protocol.peers import PeerAddress
from moaic.runtime.protocol.tls import TlsStream
from tests.runtime.comm.conftest import Linked, linked


def false_link(pair: Linked, credentials: Credentials, sender: int = 1) -> TlsStream:
    """A link to worker 0 that says that it is worker `sender`'s."""
    sock = socket.create_connection((pair.peers[0].addresses[0].address, pair.peers[0].addresses[0].port))
    stream = TlsStream(sock, client_context(credentials), is_server=False)
    stream.shake_hands()
    # Who is refused may learn of it here.
    with suppress(OSError):
        stream.sendmsg([memoryview(GREETING.pack(MAGIC, sender, 0))])
    return stream


@pytest.fixture
def pair() -> Iterator[Linked]:
    """Workers 0 and 1, each on a host of its own."""
    with linked(1, 1) as workers:
        yield workers


def is_ended(stream: TlsStream) -> bool:
    """Whether the other end hangs up within two seconds."""
    with closing(stream):
        return bool(readable([stream], 2.0)) and _has_ended(stream)


def _has_ended(stream: TlsStream) -> bool:
    try:
        return stream.recvmsg_into([memoryview(bytearray(1))])[0] == 0
    except OSError:
        return True


@pytest.mark.parametrize("count", [3, 8192, 3 << 20])
def test_collectives_over_links(pair: Linked, count: int) -> None:
    values = [torch.randn(count, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def add(transport: Transport, group: Group, rank: int) -> torch.Tensor:
        mine = values[rank].clone()
        transport.all_reduce(mine, group)
        return mine

    def gather(transport: Transport, group: Group, rank: int) -> torch.Tensor:
        return transport.all_gather(values[rank], group, SubAxis(0, count))

    for found in pair.run(SharedMemoryTransport, add):
        assert torch.equal(found, values[0] + values[1])
    for found in pair.run(SharedMemoryTransport, gather):
        assert torch.equal(found, torch.cat(values))


def test_a_failure_ends_the_wait_of_the_other_host(pair: Linked) -> None:
    pair.run(SharedMemoryTransport, lambda transport, group, rank: torch.tensor(transport.agree(group, 1)))
    pair.boxes[1].fail()
    with pytest.raises(PeerLost, match="worker 1 failed"):
        pair.boxes[0].take(1, torch.uint8)


def test_a_worker_beyond_reach_is_named(pair: Linked) -> None:
    gone = socket.create_server(("127.0.0.1", 0))
    port = gone.getsockname()[1]
    gone.close()
    addresses = (pair.peers[0].addresses[0], PeerAddress("127.0.0.1", port, "host/b"))
    listener = socket.create_server(("127.0.0.1", 0))
    links = PeerLinks(0, replace(pair.peers[0], addresses=addresses), listener)
    with pytest.raises(Unreachable, match=rf"worker 1 \(b\) at 127\.0\.0\.1:{port} cannot be reached"):
        links.write(1, [(0, 0)])
    listener.close()


def test_another_host_of_the_job_cannot_come_as_this_worker(pair: Linked) -> None:
    assert is_ended(false_link(pair, pair.authority.credentials("host/c")))
    assert is_ended(false_link(pair, pair.authority.credentials("host/a")))
    assert is_ended(false_link(pair, pair.authority.credentials("host/b"), sender=0))


def test_an_end_of_another_job_is_refused(pair: Linked) -> None:
    other = Authority("other").credentials("host/b")
    mine = replace(other, authority=pair.authority.certificate)
    assert is_ended(false_link(pair, mine))


@pytest.mark.parametrize(
    ("at", "nbytes", "words"),
    [
        (0, 8, [(WORDS + FAILED, 1)]),
        (1 << 60, 8, [(WORDS + FAILED, 1)]),
        (0, 0, [(0, 1)]),
        (0, 0, [(1 << 40, 1)]),
        (0, 0, [(FAILED, 1)]),
        (0, 0, []),
    ],
    ids=["bytes elsewhere", "bytes outside", "a word of another", "a word outside", "a failure of another", "no word"],
)
def test_a_worker_can_write_nothing_but_its_own(
    pair: Linked, at: int, nbytes: int, words: list[tuple[int, int]]
) -> None:
    stream = false_link(pair, pair.authority.credentials("host/b"))
    packed = b"".join(WORD.pack(*word) for word in words)
    stream.sendmsg([memoryview(HEAD.pack(len(words), nbytes, at) + packed + b"x" * nbytes)])
    assert is_ended(stream)
    until = time.monotonic() + 2
    while not pair.links[0].lost and time.monotonic() < until:
        time.sleep(0.01)
    assert "the link of worker 1 (b) has ended: " in pair.links[0].lost


def test_strangers_are_cut(pair: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "HANDSHAKE_SECONDS", 0.3)
    to = pair.peers[0].addresses[0]
    strangers = [socket.create_connection((to.address, to.port)) for _ in range(80)]
    for stranger in strangers:
        stranger.settimeout(3)
        assert stranger.recv(1) == b""
        stranger.close()
    pair.run(SharedMemoryTransport, lambda transport, group, rank: torch.tensor(transport.agree(group, 1)))
