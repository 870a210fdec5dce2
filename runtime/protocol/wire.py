"""Messages over a stream socket: a msgpack body and raw blocks of bytes. Nothing that is received is ever executed.

A frame is: length of the body and number of blocks (two u32), the lengths of the blocks (i64 each, -1 for an absent
one), the body, the blocks. Blocks arrive in memory of their own, ready to be used as tensors without another copy.
"""

from __future__ import annotations

import select
import signal
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor

PREFIX: Final = struct.Struct("<II")
GATHER: Final = 512
"""Pieces given to one system call; below every system's limit."""


class Closed(Exception):
    """The other end of the connection is gone."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one frame says: plain data, and blocks of bytes as one-dimensional u8 tensors."""

    body: Any
    blocks: Sequence[Tensor | None] = ()


def encode(body: Any) -> bytes:
    """The msgpack form of `body`: None, bool, int, float, str, bytes, lists and dicts."""
    return cast("bytes", msgpack.packb(body))


def decode(data: bytes | memoryview, *, frozen: bool = False) -> Any:
    """What was encoded; lists come back as tuples where it is to be `frozen`."""
    return cast("Any", msgpack.unpackb(data, strict_map_key=False, use_list=not frozen))


def frame(body: bytes, blocks: Sequence[Tensor | None] = ()) -> list[memoryview]:
    """The pieces of one frame, in order; blocks are not copied."""
    sizes = [-1 if block is None else block.numel() for block in blocks]
    head = PREFIX.pack(len(body), len(sizes)) + struct.pack(f"<{len(sizes)}q", *sizes) + body
    return [memoryview(head), *(memory(block) for block in blocks if block is not None and block.numel())]


def memory(block: Tensor) -> memoryview:
    """The bytes of a block, in place."""
    return block.numpy().data


def as_block(tensor: Tensor) -> Tensor:
    """The elements of `tensor` in row-major order as bytes of the host, without a copy where they lie so already."""
    return bytes_of(tensor.contiguous().cpu())


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    flat = tensor.detach().view(-1)
    # One element counts as contiguous whatever its stride, and no view of another type takes that.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def from_block(block: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor whose row-major bytes are `block`, sharing its memory."""
    # Not by view(): what is a view for torch cannot be written where a function of its own gives it back.
    start = int(block.storage_offset()) // dtype.itemsize
    tensor: Any = torch.empty(0, dtype=dtype)
    return tensor.set_(block.untyped_storage(), start, tuple(shape))


def _unpinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Connection:
    """One end of a socket. Sending and receiving survive an interrupt (Ctrl-C) between any two system calls."""

    def __init__(self, sock: socket.socket, allocate: Callable[[int], Tensor] = _unpinned) -> None:
        """`allocate` gives the memory for a block of so many bytes."""
        sock.setblocking(False)
        self._socket = sock
        self._outbox: deque[memoryview] = deque()
        self._inbox: deque[Message] = deque()
        self._reader = _frames(self._inbox.append, allocate)
        self._target: memoryview = next(self._reader)
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def post(self, pieces: Iterable[memoryview]) -> None:
        """Puts a frame into the outbox; `push` sends it."""
        self._outbox.extend(pieces)

    def push(self) -> bool:
        """Sends what the socket takes now; true once the outbox is empty."""
        while self._outbox:
            with uninterrupted():
                if not self._send_some():
                    return False
        return True

    def pull(self) -> None:
        """Receives what the socket has now. At the end of the stream `closed` becomes true."""
        while not self.closed:
            with uninterrupted():
                if not self._receive_some():
                    return

    def next(self) -> Message | None:
        """The oldest message received and not yet taken, if there is one."""
        return self._inbox.popleft() if self._inbox else None

    def send(self, body: Any, blocks: Sequence[Tensor | None] = ()) -> None:
        """Sends one message and waits until the socket has taken it. Raises Closed."""
        self.post(frame(encode(body), blocks))
        push_all([self])
        if self.closed:
            raise Closed

    def receive(self) -> Message:
        """Waits for a message. Raises Closed."""
        while True:
            message = self.next()
            if message is not None:
                return message
            if self.closed:
                raise Closed
            readable([self])
            self.pull()

    def close(self) -> None:
        self.closed = True
        self._socket.close()

    def _send_some(self) -> bool:
        pieces = [piece for piece, _ in zip(self._outbox, range(GATHER), strict=False)]
        try:
            sent = self._socket.sendmsg(pieces)
        except BlockingIOError:
            return False
        except OSError:
            self.closed = True
            self._outbox.clear()
            return True
        while sent:
            piece = self._outbox.popleft()
            if sent < len(piece):
                self._outbox.appendleft(piece[sent:])
            sent -= min(sent, len(piece))
        return True

    def _receive_some(self) -> bool:
        try:
            count = self._socket.recv_into(self._target)
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            self.closed = True
            return False
        rest = self._target[count:]
        self._target = rest or next(self._reader)
        return True


def _frames(deliver: Callable[[Message], None], allocate: Callable[[int], Tensor]) -> Generator[memoryview, None, None]:
    """Yields the memory to be filled next, never empty; delivers each message once all of it is there."""
    while True:
        prefix = bytearray(PREFIX.size)
        yield memoryview(prefix)
        length, count = PREFIX.unpack(prefix)
        head = bytearray(8 * count + length)
        yield memoryview(head)
        blocks: list[Tensor | None] = []
        for size in struct.unpack_from(f"<{count}q", head):
            block = None if size < 0 else allocate(size)
            if size > 0 and block is not None:
                yield memory(block)
            blocks.append(block)
        deliver(Message(decode(memoryview(head)[8 * count :]), blocks))


def push_all(connections: Sequence[Connection]) -> None:
    """Empties the outboxes of all connections, side by side; a closed one loses what it had."""
    waiting = [connection for connection in connections if not connection.push()]
    while waiting:
        poll = select.poll()
        for connection in waiting:
            poll.register(connection, select.POLLOUT)
        poll.poll()
        waiting = [connection for connection in waiting if not connection.push()]


def readable(connections: Sequence[Connection], seconds: float | None = None) -> list[Connection]:
    """Waits until one of the connections has something to receive, or has ended; gives those that do."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
    return [connection for connection in connections if connection.fileno() in ready]


@contextmanager
def uninterrupted() -> Generator[None]:
    """Holds back SIGINT's Python handler, so that what is inside happens whole or not at all."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, at: caught.append((number, at)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[-1])
