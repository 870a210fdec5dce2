"""Messages over a socket pair, in this process."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.runtime.protocol.frames import Closed, Connection
from moaic.runtime.protocol.wire import TENSORS, as_block, from_block

bodies = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 9), inner, max_size=3),
    max_leaves=10,
)


@pytest.fixture
def pair() -> Iterator[tuple[Connection[Tensor], Connection[Tensor]]]:
    one, other = (Connection(end, TENSORS) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


@given(body=bodies, sizes=st.lists(st.none() | st.integers(0, 300), max_size=5))
def test_what_is_sent_arrives(body: object, sizes: list[int | None]) -> None:
    one, other = (Connection(end, TENSORS) for end in socket.socketpair())
    blocks = [None if size is None else torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    one.send(body, blocks)
    message = other.receive()
    assert message.body == body
    for block, sent in zip(message.blocks, blocks, strict=True):
        assert (block is None) == (sent is None)
        if block is not None and sent is not None:
            assert torch.equal(block, sent)
    one.close()
    other.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_every_type_and_order(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).view(3, 4).t().to(dtype)
    assert torch.equal(from_block(as_block(tensor), dtype, (4, 3)), tensor)
    scalar = torch.ones((), dtype=dtype)
    assert torch.equal(from_block(as_block(scalar), dtype, ()), scalar)


def test_a_large_block_passes_a_small_socket(pair: tuple[Connection[Tensor], Connection[Tensor]]) -> None:
    one, other = pair
    block = torch.randint(0, 255, (5_000_000,), dtype=torch.uint8)
    sender = threading.Thread(target=lambda: one.send("large", [block, block]))
    sender.start()
    message = other.receive()
    sender.join()
    assert all(got is not None and torch.equal(got, block) for got in message.blocks)


def test_the_end_is_noticed_by_both_sides(pair: tuple[Connection[Tensor], Connection[Tensor]]) -> None:
    one, other = pair
    one.close()
    with pytest.raises(Closed):
        other.receive()
    with pytest.raises(Closed):
        other.send("anything")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Interrupts raise, also where the tests were started in the background, where a shell has them ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_does_not_tear_a_message(pair: tuple[Connection[Tensor], Connection[Tensor]]) -> None:
    one, other = pair
    block = torch.randint(0, 255, (20_000_000,), dtype=torch.uint8)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    # Nobody reads, so this waits in the middle of the message until it is interrupted.
    with pytest.raises(KeyboardInterrupt):
        one.send("first", [block])
    timer.join()
    received: list[object] = []
    reader = threading.Thread(target=lambda: received.extend(other.receive().body for _ in range(2)))
    reader.start()
    one.send("second")
    reader.join()
    assert received == ["first", "second"]
