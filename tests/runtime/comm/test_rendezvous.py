"""Process groups of workers on two hosts, in two levels: the bits of shared memory; and a store that nobody reaches."""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm import rendezvous
from moaic.runtime.comm.device_backend import CpuBackend
from moaic.runtime.comm.peer_links import Unreachable
from moaic.runtime.comm.process_group_transport import group_transport
from moaic.runtime.comm.rendezvous import meeting
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis, Transport
from moaic.runtime.comm.two_level import TwoLevelTransport
from moaic.runtime.protocol.carrier import Carrier
from tests.runtime.comm.conftest import Linked, terms

LOCAL = "127.0.0.1"


def unused() -> int:
    """What others than the first rank have instead of the socket, and close."""
    return os.open(os.devnull, os.O_RDONLY)


def test_groups_of_two_hosts(on_two_hosts: Linked) -> None:
    server = socket.create_server((LOCAL, 0))
    port = server.getsockname()[1]

    def over_groups(box: Mailbox) -> Transport:
        store = server.detach() if box.rank == 0 else unused()
        meet = meeting(store, box.rank, replace(on_two_hosts.peers[box.rank], store=port))
        return TwoLevelTransport(group_transport(Carrier.GLOO, meet, LOCAL, box.agree, CpuBackend()), box.hosts)

    def act(transport: Transport, group: Group, rank: int) -> Tensor:
        found: list[Tensor] = []
        for dtype in (torch.float32, torch.bfloat16):
            for length in (8, ONE_TURN):
                mine = terms([length], dtype)[rank]
                scattered = transport.reduce_scatter(mine, group, SubAxis(0, length // 4))
                found.append(transport.all_gather(scattered, group, SubAxis(0, length // 4)))
                transport.all_reduce(mine, group)
                found.append(mine)
        # A group without the rank that serves the store, and one of a host.
        for ranks in ((1, 2, 3), (2, 3)):
            if rank in ranks:
                mine = terms([6], torch.float32)[rank]
                transport.all_reduce(mine, Group.of(ranks, rank))
                found.append(mine)
        return torch.cat([each.float() for each in found])

    expected, found = on_two_hosts.run(SharedMemoryTransport, act), on_two_hosts.run(over_groups, act)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_store_that_nobody_serves(on_two_hosts: Linked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DIAL_SECONDS", 0.2)
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
    meet = meeting(unused(), 1, replace(on_two_hosts.peers[1], store=port))
    with pytest.raises(Unreachable, match=rf"^worker 0 at 127\.0\.0\.1:{port} cannot be reached: .*firewalls must let"):
        meet((0, 1))
