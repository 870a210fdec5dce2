"""Frames over a socket pair: whatever the bytes are, a message, a refusal in words, or the end."""

from __future__ import annotations

import random
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moaic.runtime.protocol.frames import (
    HEAD,
    MAGIC,
    VERSION,
    BlockMemory,
    Closed,
    Connection,
    Message,
    accept_all,
    encode,
    frame,
)
from moaic.runtime.protocol.limits import LIMITS, Limits, Refused

MOST_BYTES = 128 << 20
"""Memory that no stream may take, whatever it claims."""

BYTES = BlockMemory(bytearray, memoryview)

TIGHT = Limits(block_bytes=1 << 20, all_block_bytes=4 << 20)

bodies = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9), inner, max_size=3),
    max_leaves=10,
)
messages = st.tuples(bodies, st.lists(st.none() | st.binary(max_size=300), max_size=4))


def stream_of(body: Any, blocks: Sequence[bytes | None] = ()) -> bytes:
    return b"".join(frame(encode(body), [None if block is None else memoryview(block) for block in blocks]))


def raw(body: bytes, sizes: Sequence[int] = (), version: int = VERSION, magic: bytes = MAGIC) -> bytes:
    """A frame that no sender checks, without the bytes of its blocks."""
    return HEAD.pack(magic, version, len(body), len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes) + body


def received(stream: bytes, limits: Limits = LIMITS) -> list[Message[bytearray]]:
    """The messages of a stream, from a thread of its own if it is longer than a socket holds. Raises Refused."""
    one, other = socket.socketpair()
    connection = Connection(other, BYTES, limits=limits)
    sender = threading.Thread(target=_sent, args=(one, stream))
    if len(stream) <= 1 << 16:
        sender.run()
    else:
        sender.start()
    messages: list[Message[bytearray]] = []
    try:
        while True:
            messages.append(connection.receive())
    except Closed:
        return messages
    finally:
        connection.close()
        if sender.is_alive():
            sender.join()


def _sent(end: socket.socket, stream: bytes) -> None:
    with end:
        try:
            end.sendall(stream)
        except OSError:
            """Refused before its end."""


@given(sent=st.lists(messages, min_size=1, max_size=4), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_a_stream_in_any_pieces_is_the_messages(sent: list[tuple[Any, list[bytes | None]]], cuts: list[int]) -> None:
    stream = b"".join(stream_of(*message) for message in sent)
    one, other = socket.socketpair()
    connection = Connection(other, BYTES)
    for start, end in pairwise(sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})):
        one.sendall(stream[start:end])
        connection.pull()
    arrived = [connection.receive() for _ in sent]
    assert [(each.body, list(each.blocks)) for each in arrived] == sent
    assert connection.next() is None
    one.close()
    connection.close()


def test_a_stream_byte_by_byte_is_the_message() -> None:
    one, other = socket.socketpair()
    connection = Connection(other, BYTES)
    for byte in stream_of([1, ["two"]], [b"three", None, b""]):
        assert connection.next() is None
        one.sendall(bytes([byte]))
        connection.pull()
    assert connection.next() == Message([1, ["two"]], [bytearray(b"three"), None, bytearray()])
    one.close()
    connection.close()


def nested(depth: int) -> Any:
    return None if depth == 0 else [nested(depth - 1)] if depth % 2 else {1: nested(depth - 1)}


LONG_CLAIM = b"\xdd" + (1 << 20).to_bytes(4, "big")

REFUSED = {
    "magic": (raw(b"\x00", magic=b"HTTP"), "a frame that begins with b'HTTP', not b'moai'"),
    "version": (raw(b"\x00", version=9), "a frame of version 9, this end reads version 1"),
    "long body": (
        HEAD.pack(MAGIC, VERSION, 2**32 - 1, 0),
        "a body of 4,294,967,295 bytes, the most is 67,108,864",
    ),
    "no body": (raw(b""), "a body of 0 bytes, the least is 1"),
    "many blocks": (HEAD.pack(MAGIC, VERSION, 1, 65_537), "65,537 blocks, the most is 65,536"),
    "negative block": (raw(b"\x00", [0, -2]), "a block of -2 bytes, the least is -1"),
    "long block": (raw(b"\x00", [2**62]), f"a block of {2**62:,} bytes, the most is 1,048,576"),
    "long blocks": (raw(b"\x00", [1 << 20] * 5), "blocks of 5,242,880 bytes together, the most is 4,194,304"),
    "deep": (raw(encode(nested(33))), "a body of lists more than 32 deep"),
    "deep behind others": (raw(encode([[[1]] * 40, 2, nested(32)])), "a body of lists more than 32 deep"),
    "deeper than msgpack reads": (raw(b"\x91" * 5000 + b"\x00"), "a body that cannot be read: StackError"),
    "extension": (raw(b"\xd4\x07\x00"), "a body that cannot be read: ValueError"),
    "empty extension": (raw(b"\xc7\x00\x07"), "a body that cannot be read: ValueError"),
    "time": (raw(b"\xd6\xff\x00\x00\x00\x00"), "a body that cannot be read: ValueError"),
    "unhashable key": (raw(b"\x81\x90\x00"), "a body that cannot be read: TypeError"),
    "no text": (raw(b"\xa1\xff"), "a body that cannot be read: UnicodeDecodeError"),
    "reserved": (raw(b"\xc1"), "a body that cannot be read: FormatError"),
    "more than a value": (raw(b"\x00\x00"), "a body that cannot be read: ExtraData"),
    "less than a value": (raw(b"\x92\x00"), "a body that cannot be read: ValueError"),
    "many values": (
        raw(b"\xdd" + (3 << 20).to_bytes(4, "big") + b"\x80" * (3 << 20)),
        "a body of more than 2,097,152 values",
    ),
    "claims of values": (raw(LONG_CLAIM * 1000 + b"\xc0" * (1 << 20)), "a body of more than 2,097,152 values"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_violation_is_refused_in_words_and_in_little_memory(name: str) -> None:
    stream, reason = REFUSED[name]
    tracemalloc.start()
    with pytest.raises(Refused) as refusal:
        received(stream, TIGHT)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(refusal.value).startswith(reason)
    assert peak < MOST_BYTES


def test_what_is_within_the_limits_is_received() -> None:
    for body in (
        nested(32),
        [[[1]] * 100, {"a": {"b": 1}}],
        "x" * (1 << 20),
        [list(range(100_000)), "\u07c0" * 100_000],
    ):
        assert [message.body for message in received(stream_of(body))] == [body]


@pytest.mark.parametrize(
    ("body", "blocks", "reason"),
    [
        (bytes(9), [], "a body of 9 bytes, the most is 8"),
        (b"", [], "a body of 0 bytes, the least is 1"),
        (b"0", [b""] * 3, "3 blocks, the most is 2"),
        (b"0", [bytes(5)], "a block of 5 bytes, the most is 4"),
        (b"0", [bytes(4), bytes(3)], "blocks of 7 bytes together, the most is 6"),
    ],
)
def test_a_sender_keeps_the_limits(body: bytes, blocks: list[bytes], reason: str) -> None:
    limits = Limits(body_bytes=8, blocks=2, block_bytes=4, all_block_bytes=6)
    with pytest.raises(Refused, match=reason):
        frame(body, [memoryview(block) for block in blocks], limits)


@pytest.fixture
def pair() -> Iterator[tuple[Connection[bytearray], Connection[bytearray]]]:
    one, other = (Connection(end, BYTES) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_the_body_is_checked_before_memory_for_blocks_is_allocated() -> None:
    def check(body: Any, sizes: Sequence[int]) -> None:
        raise Refused(f"{body} with {list(sizes)}")

    def allocate(size: int) -> bytearray:
        raise AssertionError(size)

    one, other = socket.socketpair()
    connection = Connection(other, BlockMemory(allocate, memoryview), check)
    _sent(one, raw(encode("body"), [2**62, -1]))
    with pytest.raises(Refused, match=rf"body with \[{2**62}, -1\]"):
        connection.receive()
    assert connection.closed
    assert connection.refusal == f"body with [{2**62}, -1]"
    connection.close()


def test_memory_that_cannot_be_had_ends_the_connection() -> None:
    def allocate(size: int) -> bytearray:
        raise MemoryError(f"no {size} bytes")

    one, other = socket.socketpair()
    connection = Connection(other, BlockMemory(allocate, memoryview), accept_all)
    _sent(one, stream_of("first") + stream_of("second", [b"block"]))
    assert connection.receive().body == "first"
    for _ in range(2):
        with pytest.raises(MemoryError, match="no 5 bytes"):
            connection.receive()
    connection.close()


def test_what_was_said_before_the_end_is_received_by_one_that_sends(
    pair: tuple[Connection[bytearray], Connection[bytearray]],
) -> None:
    one, other = pair
    other.send("the reason")
    other.close()
    with pytest.raises(Closed):
        one.send("anything")
    assert one.receive().body == "the reason"


@pytest.mark.timeout(60)
def test_two_ends_that_both_send_more_than_sockets_hold(
    pair: tuple[Connection[bytearray], Connection[bytearray]],
) -> None:
    block = bytearray(random.Random(0).randbytes(1 << 20) * 64)
    arrived: list[Message[bytearray]] = []

    def exchange(end: Connection[bytearray]) -> None:
        end.send("large", [block])
        arrived.append(end.receive())

    threads = [threading.Thread(target=exchange, args=(end,), daemon=True) for end in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert arrived == [Message("large", [block])] * 2


class Fuzzer:
    """Streams of frames and of what is almost one; no more than 64 KiB each."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds: Sequence[Callable[[], bytes]] = (
            self.noise,
            self.valid,
            self.changed,
            self.truncated,
            self.claiming,
            self.deep,
            self.wide,
            self.of_another_version,
        )

    def stream(self) -> bytes:
        return self.random.choice(self.kinds)()

    def number(self, most: int) -> int:
        """A number of any magnitude."""
        return int(most ** self.random.random())

    def noise(self) -> bytes:
        return self.random.randbytes(self.random.randrange(200))

    def value(self, depth: int = 3) -> Any:
        kind = self.random.randrange(8 if depth else 6)
        if kind >= 6:
            inner = [self.value(depth - 1) for _ in range(self.random.randrange(5))]
            return inner if kind == 6 else dict(enumerate(inner))
        return (None, True, self.random.getrandbits(60), -5, 2.5, "text")[kind]

    def valid(self) -> bytes:
        blocks = [self.random.choice((None, b"", self.noise())) for _ in range(self.random.randrange(3))]
        return b"".join(stream_of(self.value(), blocks) for _ in range(self.random.randrange(1, 4)))

    def changed(self) -> bytes:
        stream = bytearray(self.valid())
        for _ in range(self.random.randrange(1, 5)):
            start, size = self.random.randrange(len(stream) + 1), self.random.randrange(1, 4)
            change = self.random.randrange(3)
            stream[start : start + size * (change != 1)] = self.random.randbytes(size * (change != 2))
        return bytes(stream)

    def truncated(self) -> bytes:
        stream = self.valid()
        return stream[: self.random.randrange(len(stream))]

    def claiming(self) -> bytes:
        """Lengths of every magnitude in the head, and of blocks, behind which less follows."""
        length, count = (self.random.getrandbits(self.random.randrange(1, 33)) for _ in range(2))
        sizes = [self.random.getrandbits(63) >> self.random.randrange(64) for _ in range(self.random.randrange(4))]
        if self.random.random() < 0.5:
            return HEAD.pack(MAGIC, VERSION, length, count) + self.noise()
        return raw(encode(self.value()), [size - 2 for size in sizes]) + self.noise()

    def deep(self) -> bytes:
        """Lists and maps within each other, which claim to have any number of elements."""
        levels = self.number(1200)
        claim = self.random.getrandbits(self.random.randrange(1, 33)).to_bytes(4, "big")
        level = self.random.choice((b"\x91", b"\x81\x00", b"\x9f", b"\xdd" + claim, b"\xdf" + claim))
        return raw(level * levels + b"\xc0" * self.number(10_000))

    def wide(self) -> bytes:
        """Many small values of any kind, most of them containers."""
        choices = bytes((0x80, 0x90, 0xC0, 0x00, self.random.randrange(256)))
        count = self.number(20_000)
        return raw(b"\xdd" + count.to_bytes(4, "big") + bytes(self.random.choices(choices, k=count)))

    def of_another_version(self) -> bytes:
        return raw(encode(self.value()), version=self.random.randrange(1 << 16))


def fuzz(seed: int, streams: int) -> None:
    fuzzer = Fuzzer(seed)
    outcomes = {"read": 0, "refused": 0}
    tracemalloc.start()
    for _ in range(streams):
        try:
            received(fuzzer.stream(), TIGHT)
            outcomes["read"] += 1
        except Refused:
            outcomes["refused"] += 1
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak:,} bytes"
    assert min(outcomes.values()) > streams / 10, outcomes


@pytest.mark.timeout(60)
def test_no_stream_does_more_than_be_refused() -> None:
    fuzz(seed=0, streams=10_000)


@pytest.mark.exact
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_stream_of_a_million_does_more_than_be_refused(seed: int) -> None:
    fuzz(seed, streams=100_000)
