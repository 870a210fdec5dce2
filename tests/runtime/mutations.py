"""Changes to messages and to streams of bytes, as broken or hostile ends send them; the same for the same seed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from moaic.runtime.protocol.frames import encode, frame

Messages = Sequence[tuple[Any, Sequence[bytes]]]
"""Bodies and the blocks of each."""

LEAVES: Sequence[Any] = (None, True, 0, -1, 1, 7, 2**31, 2**63 - 1, -(2**63), 0.5, "", "f32", b"", b"x" * 128, [], {})


class Mutator:
    """Of messages like those given: some are left as they are, some changed in their values, some in their bytes."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def stream(self, messages: Messages) -> bytes:
        """Up to four frames of such messages."""
        frames: list[bytes] = []
        for _ in range(self.random.randrange(1, 5)):
            body, blocks = self.random.choice(messages)
            if self.random.random() < 0.7:
                body = self.value(body)
            blocks = [block for block in blocks if self.random.random() < 0.9]
            frames.append(b"".join(frame(encode(body), [memoryview(block) for block in blocks])))
        stream = b"".join(frames)
        return self.bytes(stream) if self.random.random() < 0.4 else stream

    def value(self, value: Any) -> Any:
        """The value with one change somewhere in it."""
        if not isinstance(value, list) or not value or self.random.random() < 0.2:
            return self.random.choice(LEAVES)
        items: list[Any] = list(value)  # pyright: ignore[reportUnknownArgumentType]
        at = self.random.randrange(len(items))
        changes: Sequence[Callable[[], Any]] = (
            lambda: items.pop(at),
            lambda: items.insert(at, items[at]),
            lambda: items.append(self.random.choice(LEAVES)),
            lambda: items.__setitem__(at, [items[at]]),
        )
        if self.random.random() < 0.6:
            items[at] = self.value(items[at])
        else:
            self.random.choice(changes)()
        return items

    def bytes(self, data: bytes) -> bytes:
        """The bytes with some of them changed, left out or added; cut short; or others."""
        kind = self.random.randrange(6)
        if kind == 0:
            return self.random.randbytes(self.random.randrange(200))
        if kind == 1:
            return data[: self.random.randrange(len(data) + 1)]
        changed = bytearray(data)
        for _ in range(self.random.randrange(1, 5)):
            start, size = self.random.randrange(len(changed) + 1), self.random.randrange(1, 4)
            changed[start : start + size * self.random.randrange(2)] = self.random.randbytes(
                size * self.random.randrange(2)
            )
        return bytes(changed)


def hello(context: ssl.SSLContext) -> bytes:
    """The first message of a client's handshake."""
    leaving = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), leaving).do_handshake()
    return leaving.read()


def hangs_up(sock: socket.socket) -> bool:
    """Whether the other end hangs up within ten seconds of the end of this one's words."""
    sock.settimeout(10)
    try:
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        # A reset, or the end before the shutdown.
        return True
    finally:
        sock.close()
    return True
