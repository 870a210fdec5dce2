"""Messages over a stream socket: a msgpack body and raw blocks of bytes. Received data is never executed.

A frame is: length of the body and number of blocks (two u32), the lengths of the blocks (i64 each, -1 for an absent
one), the body, the blocks. Each block is received into its own memory, so a tensor can use it without another copy.
"""

from __future__ import annotations

import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor

from moaic.interrupts import uninterrupted

PREFIX: Final = struct.Struct("<II")
GATHER: Final = 512
"""Pieces per system call; below the limit of every system."""


class Closed(Exception):
    """The other end has closed the connection."""


@dataclass(frozen=True, slots=True)
class Message:
    """The content of one frame: plain data, and blocks of bytes as one-dimensional u8 tensors."""

    body: Any
    blocks: Sequence[Tensor | None] = ()


def encode(body: Any) -> bytes:
    """The msgpack form of `body`: None, bool, int, float, str, bytes, lists and dicts."""
    return cast("bytes", msgpack.packb(body))


def decode(data: bytes | memoryview, *, frozen: bool = False) -> Any:
    """The inverse of `encode`; with `frozen`, lists become tuples."""
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
    """The elements of `tensor` in row-major order as bytes of the host, without a copy if it is already so."""
    return bytes_of(tensor.contiguous().cpu())


def bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes."""
    flat = tensor.detach().view(-1)
    # A tensor of one element is contiguous whatever its stride, but a view of another type needs stride 1.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def from_block(block: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor whose row-major bytes are `block`, sharing its memory."""
    # Not by view(): autograd forbids in-place writes to a view that a custom function returns.
    start = int(block.storage_offset()) // dtype.itemsize
    tensor: Any = torch.empty(0, dtype=dtype)
    return tensor.set_(block.untyped_storage(), start, tuple(shape))


def _unpinned(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


class Connection:
    """One end of a socket. Sending and receiving survive an interrupt (Ctrl-C) between any two system calls."""

    def __init__(self, sock: socket.socket, allocate: Callable[[int], Tensor] = _unpinned) -> None:
        """`allocate` returns the memory for a block of a number of bytes."""
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
        """Append a frame to the outbox; `push` sends it."""
        self._outbox.extend(pieces)

    def push(self) -> bool:
        """Send as much as the socket takes now; true once the outbox is empty."""
        while self._outbox:
            with uninterrupted():
                if not self._send_some():
                    return False
        return True

    def pull(self) -> None:
        """Receive all that the socket has now. At the end of the stream `closed` becomes true."""
        while not self.closed:
            with uninterrupted():
                if not self._receive_some():
                    return

    def next(self) -> Message | None:
        """Take the oldest received message, if there is one."""
        return self._inbox.popleft() if self._inbox else None

    def send(self, body: Any, blocks: Sequence[Tensor | None] = ()) -> None:
        """Send one message and wait until the socket has taken it. Raises Closed."""
        self.post(frame(encode(body), blocks))
        push_all([self])
        if self.closed:
            raise Closed

    def receive(self) -> Message:
        """Wait for a message. Raises Closed."""
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
    """Yield the memory to be filled next, never empty; deliver each message once it is complete."""
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
    """Empty the outboxes of all connections concurrently; the outbox of a closed one is dropped."""
    waiting = [connection for connection in connections if not connection.push()]
    while waiting:
        poll = select.poll()
        for connection in waiting:
            poll.register(connection, select.POLLOUT)
        poll.poll()
        waiting = [connection for connection in waiting if not connection.push()]


def readable(connections: Sequence[Connection], seconds: float | None = None) -> list[Connection]:
    """Wait until connections have data or are closed, at most `seconds`; return these connections."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}
    return [connection for connection in connections if connection.fileno() in ready]
