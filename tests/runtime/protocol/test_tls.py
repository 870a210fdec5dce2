"""TLS below frames: any sizes, both directions at once, and the end of a stream that someone has changed."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from collections.abc import Iterator

import pytest

from moaic.runtime.launch.identity import CONTROLLER, Authority, client_context, server_context
from moaic.runtime.protocol.frames import BlockMemory, Closed, Connection, push_all, readable
from moaic.runtime.protocol.tls import CHUNK, JOINED, TlsStream, tune

AUTHORITY = Authority("test")

SERVER = server_context(AUTHORITY.credentials(CONTROLLER))

CLIENT = client_context(AUTHORITY.credentials("host/a"))

Streams = tuple[TlsStream, TlsStream]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends with buffers that hold less than a record."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def streams(sockets: tuple[socket.socket, socket.socket]) -> Streams:
    one, other = TlsStream(sockets[0], SERVER, is_server=True), TlsStream(sockets[1], CLIENT, is_server=False)
    thread = threading.Thread(target=other.shake_hands)
    thread.start()
    one.shake_hands()
    thread.join()
    return one, other


def connected(stream: TlsStream) -> Connection[bytearray]:
    return Connection(stream, BlockMemory(bytearray, memoryview))


def drawn(generator: random.Random, most: int) -> bytes:
    edges = [0, 1, JOINED - 1, JOINED, JOINED + 1, 4 * JOINED]
    return generator.randbytes(generator.choice([*edges, generator.randrange(most)]))


@pytest.mark.parametrize("seed", range(4))
def test_messages_of_any_sizes(streams: Streams, seed: int) -> None:
    generator = random.Random(seed)
    one, other = connected(streams[0]), connected(streams[1])
    sent = [[drawn(generator, 60_000) for _ in range(generator.randrange(40))] for _ in range(12)]

    def send() -> None:
        for blocks in sent:
            one.send(len(blocks), [bytearray(block) for block in blocks])

    thread = threading.Thread(target=send)
    thread.start()
    for blocks in sent:
        message = other.receive()
        assert message.body == len(blocks)
        assert list(message.blocks) == blocks
    thread.join()


def test_blocks_over_the_chunk(streams: Streams) -> None:
    one, other = connected(streams[0]), connected(streams[1])
    block = bytearray(random.Random(0).randbytes(2 * CHUNK + 3))
    thread = threading.Thread(target=one.send, args=(None, [bytearray(b"small"), block, bytearray(b"last")]))
    thread.start()
    assert list(other.receive().blocks) == [b"small", block, b"last"]
    thread.join()


def test_both_directions_at_once(streams: Streams) -> None:
    """Each end sends more than the sockets hold before it waits for what the other sends."""
    ends = [connected(stream) for stream in streams]
    block = bytearray(random.Random(1).randbytes(3 << 20))

    def talk(end: Connection[bytearray]) -> None:
        for _ in range(2):
            end.post(b"\xc0", [block])
        push_all([end])
        received.extend(end.receive().blocks[0] for _ in range(2))

    received: list[bytearray | None] = []
    threads = [threading.Thread(target=talk, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert received == [block] * 4


def test_partial_sends_lose_and_repeat_nothing(streams: Streams) -> None:
    one, other = streams
    one.setblocking(False)
    other.setblocking(False)
    generator = random.Random(2)
    data = generator.randbytes(1 << 20)
    rest, received, waits = memoryview(data), bytearray(), 0
    target = bytearray(50_000)
    while len(received) < len(data):
        try:
            # The caller may add pieces behind those of a call that could not finish.
            size = generator.randrange(1, 40_000)
            rest = rest[one.sendmsg([rest[:size], rest[size : 2 * size]]) :] if rest else rest
        except BlockingIOError:
            waits += 1
        try:
            received += target[: other.recvmsg_into([memoryview(target)[: generator.randrange(1, 50_000)]])[0]]
        except BlockingIOError:
            waits += 1
    assert received == data
    assert waits > 100


def test_nothing_to_receive_is_no_end(streams: Streams) -> None:
    streams[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        streams[0].recvmsg_into([memoryview(bytearray(10))])


def test_a_changed_byte_ends_the_connection(streams: Streams, sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = streams
    one.sendmsg([memoryview(b"first")])
    assert other.recvmsg_into([memoryview(bytearray(5))]) == (5, None)
    one.sendmsg([memoryview(b"second")])
    record = bytearray(sockets[1].recv(1000))
    record[-1] ^= 1
    sockets[0].send(record)
    with pytest.raises(ssl.SSLError):
        other.recvmsg_into([memoryview(bytearray(6))])


@pytest.mark.parametrize("change", ["flip", "drop", "repeat", "plain"])
def test_a_changed_stream_closes_its_connection(
    streams: Streams, sockets: tuple[socket.socket, socket.socket], change: str
) -> None:
    one, other = connected(streams[0]), connected(streams[1])
    one.send("first")
    record = sockets[1].recv(1000)
    one.send("second")
    second = sockets[1].recv(1000)
    flipped = bytes([*record[:20], record[20] ^ 1, *record[21:]])
    wire = {"flip": flipped, "drop": second, "repeat": record, "plain": b"moai" * 10}[change]
    if change == "repeat":
        sockets[0].send(record)
        assert other.receive().body == "first"
    sockets[0].send(wire)
    with pytest.raises(Closed):
        other.receive()


def test_the_end_of_a_stream_is_seen(streams: Streams) -> None:
    one, other = connected(streams[0]), connected(streams[1])
    one.send("last")
    one.close()
    assert other.receive().body == "last"
    assert readable([other], 5)
    with pytest.raises(Closed):
        other.receive()


def test_the_end_within_a_record_is_seen(streams: Streams, sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = connected(streams[0]), connected(streams[1])
    one.send("cut")
    record = sockets[1].recv(1000)
    sockets[0].send(record[:-1])
    sockets[0].close()
    with pytest.raises(Closed):
        other.receive()


def test_what_came_before_a_reset_is_received() -> None:
    """The last message of an end that dies says why."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    one, other = TlsStream(near, SERVER, is_server=True), TlsStream(far, CLIENT, is_server=False)
    thread = threading.Thread(target=other.shake_hands)
    thread.start()
    one.shake_hands()
    thread.join()
    # It has not read what it was sent, so that its end is a reset.
    one.sendmsg([memoryview(b"unread")])
    other.sendmsg([memoryview(b"reason")])
    far.close()
    receiver = connected(one)
    assert readable([receiver], 5)
    target = bytearray(100)
    assert one.recvmsg_into([memoryview(target)]) == (6, None)
    assert target[:6] == b"reason"
    assert one.recvmsg_into([memoryview(target)]) == (0, None)
    receiver.close()


def test_a_handshake_takes_nothing_behind_it(sockets: tuple[socket.socket, socket.socket]) -> None:
    one, other = TlsStream(sockets[0], SERVER, is_server=True), TlsStream(sockets[1], CLIENT, is_server=False)

    def greet() -> None:
        other.shake_hands()
        other.sendmsg([memoryview(b"first")])

    thread = threading.Thread(target=greet)
    thread.start()
    one.shake_hands()
    thread.join()
    assert readable([connected(one)], 5), "a poll does not see the message"
    target = bytearray(5)
    one.recvmsg_into([memoryview(target)])
    assert target == b"first"


def test_a_tuned_socket_finds_that_the_other_host_is_gone() -> None:
    with socket.socket() as sock:
        tune(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT]
        assert [sock.getsockopt(socket.IPPROTO_TCP, each) for each in options] == [5, 2, 3]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_who_waits_finds_that_the_other_host_is_gone(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, _ = streams
    monkeypatch.setattr(TlsStream, "is_unanswered", True)
    with pytest.raises(Closed):
        connected(waiting).receive()
