"""Four workers on two hosts, as threads of this process, for tests of collectives."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm.peer_links import PeerLinks
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.transport import Group, Transport
from moaic.runtime.launch.identity import Authority
from moaic.runtime.protocol.peers import PeerAddress, Peers
from moaic.runtime.protocol.shared_memory import create_memory

NAMES = ("host/a", "host/a", "host/b", "host/b")

RANKS = range(len(NAMES))

Act = Callable[[Transport, Group, int], Tensor]

Make = Callable[[Mailbox], Transport]


@dataclass
class Four:
    """Two workers on each of two hosts, on threads of this process."""

    boxes: list[Mailbox]
    links: list[PeerLinks]
    peers: list[Peers]

    def run(self, make: Make, act: Act) -> list[Tensor]:
        """What each computes, at the same time."""

        def one(rank: int) -> Tensor:
            return act(make(self.boxes[rank]), Group.of(RANKS, rank), rank)

        with ThreadPoolExecutor(len(RANKS)) as threads:
            return list(threads.map(one, RANKS))

    def sent(self) -> int:
        return sum(each.sent for each in self.links)


@pytest.fixture(scope="module")
def on_two_hosts() -> Iterator[Four]:
    authority = Authority("test")
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in RANKS]
    addresses = tuple(
        PeerAddress("127.0.0.1", listener.getsockname()[1], name)
        for listener, name in zip(listeners, NAMES, strict=True)
    )
    made = {name: authority.credentials(name) for name in dict.fromkeys(NAMES)}
    peers = [
        Peers(addresses, rank // 2 * 2, 2, made[name].certificate, made[name].key, made[name].authority)
        for rank, name in enumerate(NAMES)
    ]
    links = [PeerLinks(rank, peers[rank], listeners[rank]) for rank in RANKS]
    memories = [create_memory(len(RANKS)) for _ in made]
    boxes = [Mailbox(memories[rank // 2], rank, len(RANKS), (), links=links[rank]) for rank in RANKS]
    for memory in memories:
        os.close(memory)
    yield Four(boxes, links, peers)
    for each in links:
        each.close()


def terms(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """One for each rank, of very different sizes, so that another order has other bits."""
    random = torch.Generator().manual_seed(0)
    scales = torch.logspace(-2, 2, 4)[torch.randperm(4, generator=random)]
    return [(torch.randn(shape, generator=random) * scale * 9).to(dtype) for scale in scales]
