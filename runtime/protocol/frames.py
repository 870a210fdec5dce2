"""Messages over a stream socket: a msgpack body and raw blocks of bytes. Received data is never executed.

A frame is: a head (magic, version, length of the body, number of blocks), the lengths of the blocks (i64 each, -1 for
an absent one), the body, the blocks. Every length is compared with a limit before memory for it is allocated. Each
block is received into its own memory, so what reads it needs no other copy. No torch here: hosts without it relay
frames.
"""

from __future__ import annotations

import select
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from moaic.interrupts import uninterrupted
from moaic.runtime.protocol.body_checks import read_body
from moaic.runtime.protocol.limits import LIMITS, Limits, Refused
from moaic.runtime.protocol.tls import TlsStream

MAGIC: Final = b"moai"

VERSION: Final = 1

HEAD: Final = struct.Struct("<4sHII")
"""Magic, version, bytes of the body, number of blocks."""

GATHER: Final = 512
"""Pieces per system call; below the limit of every system."""

READ_AHEAD: Final = 1 << 14
"""Bytes received in the same system call as the memory to be filled next: most messages are smaller."""

CHECK_SECONDS: Final = 1.0
"""Interval at which an end that waits looks whether the other one is still there."""

Block = TypeVar("Block")


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Polled = TypeVar("Polled", bound=HasDescriptor)


class ByteStream(Protocol):
    """The calls of a socket that a connection uses; each raises OSError, of which BlockingIOError says `not now`."""

    def fileno(self) -> int: ...

    def setblocking(self, flag: bool, /) -> None: ...

    def sendmsg(self, pieces: Sequence[memoryview], /) -> int: ...

    def recvmsg_into(self, targets: Sequence[memoryview], /) -> tuple[int, *tuple[Any, ...]]:
        """Fill the targets in order, with less than their whole only if there is no more for now."""
        ...

    def close(self) -> None: ...


class Closed(Exception):
    """The other end has closed the connection."""


@dataclass(frozen=True, slots=True)
class BlockMemory(Generic[Block]):
    """Where blocks are: `allocate` makes one of a number of bytes, `view` gives the bytes of one, in place."""

    allocate: Callable[[int], Block]
    view: Callable[[Block], memoryview]


BYTES: Final[BlockMemory[bytearray]] = BlockMemory(bytearray, memoryview)
"""Blocks of ends that only pass them on."""


@dataclass(frozen=True, slots=True)
class Message(Generic[Block]):
    """The content of one frame: plain data, and blocks of bytes."""

    body: Any
    blocks: Sequence[Block | None] = ()


Check = Callable[[Any, Sequence[int]], None]
"""Takes a body and the lengths of the blocks, -1 for an absent one, before these are allocated; raises Refused."""


def accept_all(body: Any, sizes: Sequence[int]) -> None:
    """The check of an end that takes any blocks."""


def encode(body: Any) -> bytes:
    """The msgpack form of `body`: None, bool, int, float, str, bytes, lists and dicts."""
    return cast("bytes", msgpack.packb(body))


def decode(data: bytes | memoryview, *, frozen: bool = False) -> Any:
    """The inverse of `encode`, without limits; with `frozen`, lists become tuples."""
    return cast("Any", msgpack.unpackb(data, strict_map_key=False, use_list=not frozen))


def frame(body: bytes, blocks: Sequence[memoryview | None] = (), limits: Limits = LIMITS) -> list[memoryview]:
    """The pieces of one frame, in order; blocks are not copied. Raises Refused for sizes over the limits."""
    sizes = [-1 if block is None else block.nbytes for block in blocks]
    _check_counts(len(body), len(sizes), limits)
    _check_sizes(sizes, limits)
    head = HEAD.pack(MAGIC, VERSION, len(body), len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes) + body
    return [memoryview(head), *(block for block in blocks if block)]


class Connection(Generic[Block]):
    """One end of a socket. Sending and receiving survive an interrupt (Ctrl-C) between any two system calls.

    What is received wrongly, or cannot be stored, ends the connection: no frame can be read behind it.
    """

    def __init__(
        self, sock: ByteStream, memory: BlockMemory[Block], check: Check = accept_all, limits: Limits = LIMITS
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._memory = memory
        self._limits = limits
        self._outbox: deque[memoryview] = deque()
        self.unsent = 0
        """Bytes in the outbox."""
        self._inbox: deque[Message[Block]] = deque()
        self._reader = _frames(self._inbox.append, memory, check, limits)
        self._target: memoryview = next(self._reader)
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._ending: Exception | None = None
        self._is_cut = False
        """Whether the socket takes no more data."""

    @property
    def closed(self) -> bool:
        """Whether no more messages come: closed by either end, or ended by one that this end could not receive."""
        return self._ending is not None

    @property
    def refusal(self) -> str:
        """Why this end has ended the connection; empty if it has not."""
        return "" if self._ending is None or isinstance(self._ending, Closed) else str(self._ending)

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, body: bytes, blocks: Sequence[Block | None] = ()) -> int:
        """Append a frame to the outbox; `push` sends it. Returns its bytes. Raises Refused for one over the limits."""
        view = self._memory.view
        pieces = frame(body, [None if block is None else view(block) for block in blocks], self._limits)
        self._outbox.extend(pieces)
        size = sum(map(len, pieces))
        self.unsent += size
        return size

    def push(self) -> bool:
        """Send as much as the socket takes now; true once the outbox is empty."""
        while self._outbox:
            with uninterrupted():
                if not self._send_some():
                    return False
        return True

    def pull(self) -> None:
        """Receive all that the socket has now; if that is its end, `closed` becomes true."""
        while self.pull_some():
            pass

    def pull_some(self) -> bool:
        """Receive once, at most a block and READ_AHEAD bytes behind it; whether there may be more now."""
        if self._ending is not None:
            return False
        with uninterrupted():
            return self._receive_some()

    def check(self) -> None:
        """End a connection to another host that has gone without a word."""
        if isinstance(self._socket, TlsStream) and self._socket.is_unanswered:
            self._cut()
            self._end(Closed())

    def next(self) -> Message[Block] | None:
        """Take the oldest received message, if there is one."""
        return self._inbox.popleft() if self._inbox else None

    def send(self, body: Any, blocks: Sequence[Block | None] = ()) -> None:
        """Send one message and wait until the socket has taken it. Raises Closed, and Refused as `post` does."""
        self.post(encode(body), blocks)
        push_all([self])
        if self._is_cut:
            raise Closed

    def receive(self) -> Message[Block]:
        """Wait for a message. Raises Closed, Refused, or what kept a block from being allocated."""
        while not self._inbox:
            if self._ending is not None:
                raise self._ending
            self.pull()
            if not self._inbox and self._ending is None and not readable([self], CHECK_SECONDS):
                self.check()
        return self._inbox.popleft()

    def close(self) -> None:
        self._end(Closed())
        self._socket.close()

    def _cut(self) -> None:
        self._is_cut = True
        self._outbox.clear()
        self.unsent = 0

    def _end(self, reason: Exception) -> None:
        self._ending = self._ending or reason

    def _send_some(self) -> bool:
        pieces = list(islice(self._outbox, GATHER))
        try:
            sent = self._socket.sendmsg(pieces)
        except BlockingIOError:
            return False
        except OSError:
            self._cut()
            # The other end may have said why it has ended.
            self.pull()
            self._end(Closed())
            return True
        self.unsent -= sent
        while sent:
            piece = self._outbox.popleft()
            if sent < len(piece):
                self._outbox.appendleft(piece[sent:])
            sent -= min(sent, len(piece))
        return True

    def _receive_some(self) -> bool:
        """Receive once; whether there may be more now."""
        try:
            count = self._socket.recvmsg_into((self._target, self._ahead))[0]
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            self._end(Closed())
            return False
        try:
            self._fill(count)
        except Exception as error:
            self._end(error)
        # So little did not fill the memory: that was all, and the end of the stream is seen the next time.
        return count > READ_AHEAD

    def _fill(self, count: int) -> None:
        """Advance by `count` bytes received, first into the target, the others into the memory for reading ahead."""
        rest = self._ahead[: max(0, count - len(self._target))]
        self._target = self._target[count:] or next(self._reader)
        while rest:
            size = min(len(self._target), len(rest))
            self._target[:size] = rest[:size]
            self._target, rest = self._target[size:] or next(self._reader), rest[size:]


class Pushed(Protocol):
    """A connection, or what stands for several behind one socket."""

    @property
    def closed(self) -> bool: ...

    def fileno(self) -> int: ...

    def push(self) -> bool: ...

    def pull(self) -> None: ...

    def check(self) -> None: ...


def push_all(connections: Sequence[Pushed]) -> None:
    """Empty the outboxes of all connections concurrently; one that is closed is not waited for.

    Receives what comes meanwhile: an end that waits until all it has to say is taken may itself be waited for.
    """
    waiting = [connection for connection in connections if not connection.push()]
    while waiting := [connection for connection in waiting if not connection.closed]:
        poll = select.poll()
        for connection in connections:
            if not connection.closed:
                poll.register(connection, select.POLLIN)
        for connection in waiting:
            poll.register(connection, select.POLLIN | select.POLLOUT)
        events = dict(poll.poll(CHECK_SECONDS * 1000))
        if not events:
            for connection in waiting:
                connection.check()
        for connection in connections:
            if events.get(connection.fileno(), 0) & ~select.POLLOUT:
                connection.pull()
        waiting = [connection for connection in waiting if not connection.push()]


def readable(connections: Sequence[Polled], seconds: float | None = None) -> list[Polled]:
    """Wait until connections have data or are closed, at most `seconds`; return these connections."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
    return [connection for connection in connections if connection.fileno() in ready]


class Arrivals(Generic[Polled]):
    """What `readable` tells of the same connections again and again: many are registered once. For any threads."""

    def __init__(self, connections: Sequence[Polled]) -> None:
        self._by_descriptor = {connection.fileno(): connection for connection in connections}
        self._poll = select.epoll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def wait(self, seconds: float) -> list[Polled]:
        """Wait until connections have data or are closed, at most `seconds`; return these connections."""
        return [self._by_descriptor[descriptor] for descriptor, _ in self._poll.poll(seconds)]


def _frames(
    deliver: Callable[[Message[Block]], None], memory: BlockMemory[Block], check: Check, limits: Limits
) -> Generator[memoryview, None, NoReturn]:
    """Yield the memory to be filled next, never empty; deliver each message once it is complete. Raises Refused."""
    while True:
        head = bytearray(HEAD.size)
        yield memoryview(head)
        magic, version, length, count = HEAD.unpack(head)
        _check_head(magic, version)
        _check_counts(length, count, limits)
        packed = bytearray(8 * count)
        if count:
            yield memoryview(packed)
        sizes = struct.unpack(f"<{count}q", packed)
        _check_sizes(sizes, limits)
        data = bytearray(length)
        yield memoryview(data)
        body = read_body(data, limits)
        check(body, sizes)
        blocks: list[Block | None] = []
        for size in sizes:
            block = None if size < 0 else memory.allocate(size)
            blocks.append(block)
            if size > 0 and block is not None:
                yield memory.view(block)
        deliver(Message(body, blocks))


def _check_head(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise Refused(f"a frame that begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise Refused(f"a frame of version {version}, this end reads version {VERSION}")


def _check_counts(length: int, count: int, limits: Limits) -> None:
    if length == 0:
        raise Refused("a body of 0 bytes, the least is 1")
    if length > limits.body_bytes:
        raise Refused(f"a body of {length:,} bytes, the most is {limits.body_bytes:,}")
    if count > limits.blocks:
        raise Refused(f"{count:,} blocks, the most is {limits.blocks:,}")


def _check_sizes(sizes: Sequence[int], limits: Limits) -> None:
    if not sizes:
        return
    if min(sizes) < -1:
        raise Refused(f"a block of {min(sizes):,} bytes, the least is -1")
    if limits.block_bytes is not None and max(sizes) > limits.block_bytes:
        raise Refused(f"a block of {max(sizes):,} bytes, the most is {limits.block_bytes:,}")
    if limits.all_block_bytes is not None:
        together = sum(size for size in sizes if size > 0)
        if together > limits.all_block_bytes:
            raise Refused(f"blocks of {together:,} bytes together, the most is {limits.all_block_bytes:,}")
