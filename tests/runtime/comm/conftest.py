"""Workers of several hosts, as threads of this process, for tests of collectives and links."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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

Act = Callable[[Transport, Group, int], Tensor]

Make = Callable[[Mailbox], Transport]


@dataclass
class Linked:
    """Workers of several hosts, on threads of this process."""

    authority: Authority
    peers: list[Peers]
    links: list[PeerLinks]
    boxes: list[Mailbox]

    def run(self, make: Make, act: Act) -> list[Tensor]:
        """What each computes, at the same time."""
        ranks = range(len(self.boxes))

        def one(rank: int) -> Tensor:
            return act(make(self.boxes[rank]), Group.of(ranks, rank), rank)

        with ThreadPoolExecutor(len(ranks)) as threads:
            return list(threads.map(one, ranks))

    def sent(self) -> int:
        return sum(each.sent for each in self.links)


@contextmanager
def linked(*counts: int) -> Generator[Linked]:
    """Workers of hosts `host/a`, `host/b` and on, each of which has so many."""
    authority = Authority("test")
    hosts = [f"host/{chr(ord('a') + host)}" for host in range(len(counts))]
    names = [name for name, count in zip(hosts, counts, strict=True) for _ in range(count)]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in names]
    addresses = tuple(
        PeerAddress("127.0.0.1", listener.getsockname()[1], name)
        for listener, name in zip(listeners, names, strict=True)
    )
    peers: list[Peers] = []
    boxes: list[Mailbox] = []
    links: list[PeerLinks] = []
    for name, count in zip(hosts, counts, strict=True):
        mine, memory, first = authority.credentials(name), create_memory(len(names)), len(peers)
        for rank in range(first, first + count):
            peers.append(Peers(addresses, first, count, mine.certificate, mine.key, mine.authority))
            links.append(PeerLinks(rank, peers[rank], listeners[rank]))
            boxes.append(Mailbox(memory, rank, len(names), (), links=links[rank]))
        os.close(memory)
    yield Linked(authority, peers, links, boxes)
    for each in links:
        each.close()


@pytest.fixture(scope="module")
def on_two_hosts() -> Iterator[Linked]:
    """Two workers on each of two hosts."""
    with linked(2, 2) as workers:
        yield workers


def terms(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """One for each rank, of very different sizes, so that another order has other bits."""
    random = torch.Generator().manual_seed(0)
    scales = torch.logspace(-2, 2, 4)[torch.randperm(4, generator=random)]
    return [(torch.randn(shape, generator=random) * scale * 9).to(dtype) for scale in scales]
