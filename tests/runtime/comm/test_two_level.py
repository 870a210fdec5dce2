"""Collectives in two levels, between four workers on two hosts: the bits of one level, and fewer bytes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm import two_level
from moaic.runtime.comm.peer_links import PeerLinks
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis
from moaic.runtime.comm.two_level import PIECE_BYTES, TwoLevelTransport, levels
from moaic.runtime.launch.identity import Authority
from moaic.runtime.protocol.peers import PeerAddress, Peers
from moaic.runtime.protocol.shared_memory import create_memory

NAMES = ("host/a", "host/a", "host/b", "host/b")

RANKS = range(len(NAMES))

Act = Callable[[SharedMemoryTransport, Group, int], Tensor]


@dataclass
class Four:
    """Two workers on each of two hosts, on threads of this process."""

    boxes: list[Mailbox]
    links: list[PeerLinks]

    def run(self, kind: type[SharedMemoryTransport], act: Act) -> list[Tensor]:
        """What each computes, at the same time."""

        def one(rank: int) -> Tensor:
            return act(kind(self.boxes[rank]), Group.of(RANKS, rank), rank)

        with ThreadPoolExecutor(len(RANKS)) as threads:
            return list(threads.map(one, RANKS))

    def sent(self) -> int:
        return sum(each.sent for each in self.links)


@pytest.fixture(scope="module")
def four() -> Iterator[Four]:
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
    yield Four(boxes, links)
    for each in links:
        each.close()


def terms(shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """One for each rank, of very different sizes, so that another order has other bits."""
    random = torch.Generator().manual_seed(0)
    scales = torch.logspace(-2, 2, 4)[torch.randperm(4, generator=random)]
    return [(torch.randn(shape, generator=random) * scale * 9).to(dtype) for scale in scales]


def reduce(terms: Sequence[Tensor]) -> Act:
    def act(transport: SharedMemoryTransport, group: Group, rank: int) -> Tensor:
        found = terms[rank].clone()
        transport.all_reduce(found, group)
        return found

    return act


def scatter(terms: Sequence[Tensor], sub_axis: SubAxis) -> Act:
    return lambda transport, group, rank: transport.reduce_scatter(terms[rank], group, sub_axis)


def gather(parts: Sequence[Tensor], sub_axis: SubAxis) -> Act:
    return lambda transport, group, rank: transport.all_gather(parts[rank], group, sub_axis)


def check(four: Four, act: Act) -> None:
    """That both kinds give the same bits, shapes and strides."""
    flat, two = four.run(SharedMemoryTransport, act), four.run(TwoLevelTransport, act)
    for one, other in zip(flat, two, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("length", [0, 1, 7, 4096, 3 * ONE_TURN + 5, 5 << 20, PIECE_BYTES // 8 + 3])
def test_sums(four: Four, dtype: torch.dtype, length: int) -> None:
    check(four, reduce(terms([length], dtype)))


def test_tensors_of_several_pieces(four: Four, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "PIECE_BYTES", 256)
    for dtype in (torch.float32, torch.bfloat16):
        given = terms([8, 12, 20], dtype)
        for axis in (SubAxis(0, 2), SubAxis(1, 3), SubAxis(2, 5)):
            check(four, scatter(given, axis))
            check(four, gather(given, axis))
        check(four, reduce(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sub_axis", [SubAxis(0, 2), SubAxis(1, 3), SubAxis(1, 1), SubAxis(2, 1)], ids=str)
def test_scattered_sums(four: Four, dtype: torch.dtype, sub_axis: SubAxis) -> None:
    given = terms([8, 12, 4], dtype)
    check(four, scatter(given, sub_axis))
    check(four, scatter([each.mT for each in given], SubAxis(1, 1)))


@pytest.mark.parametrize("sub_axis", [SubAxis(0, 2), SubAxis(1, 3), SubAxis(1, 1), SubAxis(2, 4)], ids=str)
def test_gathered_parts(four: Four, sub_axis: SubAxis) -> None:
    given = terms([2, 3, 4], torch.float32)
    check(four, gather(given, sub_axis))


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.5), (torch.bfloat16, 0.75)], ids=str)
def test_fewer_bytes_cross_the_network(four: Four, dtype: torch.dtype, share: float) -> None:
    act = reduce(terms([6 << 18], dtype))
    counts = [four.sent()]
    for kind in (SharedMemoryTransport, TwoLevelTransport):
        four.run(kind, act)
        counts.append(four.sent())
    flat, two = counts[1] - counts[0], counts[2] - counts[1]
    assert two < 1.01 * share * flat


def test_what_has_levels() -> None:
    def sizes(hosts: str, *ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        found = levels(Group.of(ranks, ranks[1]), hosts)
        return None if found is None else (found.inside.ranks, found.between.ranks)

    assert sizes("aabb", 0, 1, 2, 3) == ((0, 1), (1, 3))
    assert sizes("aaaabbbb", 0, 2, 4, 6) == ((0, 2), (2, 6))
    assert sizes("aabbcc", 0, 1, 2, 3, 4, 5) == ((0, 1), (1, 3, 5))
    assert sizes("aaaa", 0, 1, 2, 3) is None
    assert sizes("abcd", 0, 1, 2, 3) is None
    assert sizes("aaab", 0, 1, 2, 3) is None
    assert sizes("aaabbb", 0, 1, 2, 3, 4, 5) is None, "three are no subtree of the sum of six"
