"""Collectives in two levels, between four workers on two hosts: the bits of one level, and fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm import two_level
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis, Transport
from moaic.runtime.comm.two_level import PIECE_BYTES, TwoLevelTransport, levels
from tests.runtime.comm.conftest import Act, Linked, terms


def in_levels(box: Mailbox) -> Transport:
    return TwoLevelTransport(SharedMemoryTransport(box), box.hosts)


def reduce(terms: Sequence[Tensor]) -> Act:
    def act(transport: Transport, group: Group, rank: int) -> Tensor:
        found = terms[rank].clone()
        transport.all_reduce(found, group)
        return found

    return act


def scatter(terms: Sequence[Tensor], sub_axis: SubAxis) -> Act:
    return lambda transport, group, rank: transport.reduce_scatter(terms[rank], group, sub_axis)


def gather(parts: Sequence[Tensor], sub_axis: SubAxis) -> Act:
    return lambda transport, group, rank: transport.all_gather(parts[rank], group, sub_axis)


def check(on_two_hosts: Linked, act: Act) -> None:
    """That both kinds give the same bits, shapes and strides."""
    flat, two = on_two_hosts.run(SharedMemoryTransport, act), on_two_hosts.run(in_levels, act)
    for one, other in zip(flat, two, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
@pytest.mark.parametrize("length", [0, 1, 7, 4096, 3 * ONE_TURN + 5, 5 << 20, PIECE_BYTES // 8 + 3])
def test_sums(on_two_hosts: Linked, dtype: torch.dtype, length: int) -> None:
    check(on_two_hosts, reduce(terms([length], dtype)))


def test_tensors_of_several_pieces(on_two_hosts: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_level, "PIECE_BYTES", 256)
    for dtype in (torch.float32, torch.bfloat16):
        given = terms([8, 12, 20], dtype)
        for axis in (SubAxis(0, 2), SubAxis(1, 3), SubAxis(2, 5)):
            check(on_two_hosts, scatter(given, axis))
            check(on_two_hosts, gather(given, axis))
        check(on_two_hosts, reduce(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sub_axis", [SubAxis(0, 2), SubAxis(1, 3), SubAxis(1, 1), SubAxis(2, 1)], ids=str)
def test_scattered_sums(on_two_hosts: Linked, dtype: torch.dtype, sub_axis: SubAxis) -> None:
    given = terms([8, 12, 4], dtype)
    check(on_two_hosts, scatter(given, sub_axis))
    check(on_two_hosts, scatter([each.mT for each in given], SubAxis(1, 1)))


@pytest.mark.parametrize("sub_axis", [SubAxis(0, 2), SubAxis(1, 3), SubAxis(1, 1), SubAxis(2, 4)], ids=str)
def test_gathered_parts(on_two_hosts: Linked, sub_axis: SubAxis) -> None:
    given = terms([2, 3, 4], torch.float32)
    check(on_two_hosts, gather(given, sub_axis))


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.5), (torch.bfloat16, 0.75)], ids=str)
def test_fewer_bytes_cross_the_network(on_two_hosts: Linked, dtype: torch.dtype, share: float) -> None:
    act = reduce(terms([6 << 18], dtype))
    counts = [on_two_hosts.sent()]
    for make in (SharedMemoryTransport, in_levels):
        on_two_hosts.run(make, act)
        counts.append(on_two_hosts.sent())
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
