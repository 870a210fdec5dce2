"""Collectives of a device whose memory is apart from the host's: only copies travel, and none is the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import CpuBackend, DeviceBackend
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.staged_transport import StagedTransport
from moaic.runtime.comm.transport import Group, SubAxis, Transport
from moaic.runtime.comm.transport_layer import TransportLayer
from moaic.runtime.comm.two_level import TwoLevelTransport
from moaic.runtime.emulation.backend import EmulatedGpuBackend
from moaic.runtime.host.gpu_specs import TARGETS
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.worker import serve
from tests.runtime.comm.conftest import Linked, terms


class Apart(CpuBackend):
    """A device that gets what is on the host by copies alone."""

    __slots__ = ("_staged",)

    def __init__(self) -> None:
        object.__setattr__(self, "_staged", list[Tensor]())

    def staging(self, size: int) -> Tensor:
        made = torch.full((size,), 0x55, dtype=torch.uint8)
        self._staged.append(made)
        return made

    def to_device(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def is_staged(self, tensor: Tensor) -> bool:
        return any(tensor.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in self._staged)


class OfHost(TransportLayer):
    """What carries tensors of the host, and refuses others."""

    def __init__(self, below: Transport, device: Apart) -> None:
        super().__init__(below)
        self._device = device

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        super().all_reduce(self._checked(tensor), group)

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return super().reduce_scatter(self._checked(tensor), group, sub_axis)

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return super().all_gather(self._checked(tensor), group, sub_axis)

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        return super().all_to_all(self._checked(tensor), group, given, taken)

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        return super().begin_pass([self._checked(tensor) for tensor in tensors], group)

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        super().broadcast(self._checked(tensor), group)

    def _checked(self, tensor: Tensor) -> Tensor:
        assert self._device.is_staged(tensor)
        return tensor


def all_reduced(transport: Transport, group: Group, mine: Tensor) -> list[Tensor]:
    transport.all_reduce(mine, group)
    return [mine]


def broadcast(transport: Transport, group: Group, mine: Tensor) -> list[Tensor]:
    transport.broadcast(mine, group)
    transport.wait_sends()
    return [mine]


COLLECTIVES: dict[str, Callable[[Transport, Group, Tensor], list[Tensor]]] = {
    "all_reduce": all_reduced,
    "reduce_scatter": lambda transport, group, mine: [transport.reduce_scatter(mine, group, SubAxis(0, 2))],
    "of a transpose": lambda transport, group, mine: [transport.reduce_scatter(mine.mT, group, SubAxis(1, 2))],
    "all_gather": lambda transport, group, mine: [transport.all_gather(mine, group, SubAxis(1, 3))],
    "all_to_all": lambda transport, group, mine: [transport.all_to_all(mine, group, SubAxis(0, 2), SubAxis(1, 3))],
    "pass": lambda transport, group, mine: transport.begin_pass([mine, mine + 1], group)(),
    "broadcast": broadcast,
}


SUMS = ("all_reduce", "reduce_scatter", "of a transpose")


def staged(box: Mailbox) -> Transport:
    device = Apart()
    return StagedTransport(OfHost(SharedMemoryTransport(box), device), device)


def check(on_two_hosts: Linked, name: str, dtype: torch.dtype) -> None:
    given = terms([8, 3], dtype)

    def act(transport: Transport, group: Group, rank: int) -> Tensor:
        return torch.cat(COLLECTIVES[name](transport, group, given[rank].clone()))

    expected, found = on_two_hosts.run(SharedMemoryTransport, act), on_two_hosts.run(staged, act)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_the_bits_are_those_of_the_host(on_two_hosts: Linked, name: str, dtype: torch.dtype) -> None:
    check(on_two_hosts, name, dtype)


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in SUMS])
def test_booleans(on_two_hosts: Linked, name: str) -> None:
    check(on_two_hosts, name, torch.bool)


def test_what_was_sent_may_be_overwritten(on_two_hosts: Linked) -> None:
    """The others read later: the copy is what they get."""

    def act(transport: Transport, group: Group, rank: int) -> Tensor:
        mine = torch.full((5,), float(rank))
        finish = transport.begin_pass([mine], group)
        mine.fill_(-1)
        return finish()[0]

    assert [tensor[0].item() for tensor in on_two_hosts.run(staged, act)] == [3, 0, 1, 2]


def layers(transport: Transport | None) -> Iterator[type[Transport]]:
    while transport is not None:
        yield type(transport)
        transport = getattr(transport, "_below", None)


def test_workers_on_gpus_stage_what_links_carry(on_two_hosts: Linked) -> None:
    def made(backend: DeviceBackend) -> list[type[Transport]]:
        box, peers = on_two_hosts.boxes[0], on_two_hosts.peers[0]
        transport = serve._transport(Carrier.MEMORY, box, -1, peers, backend)  # pyright: ignore[reportPrivateUsage]
        return list(layers(transport))

    assert made(CpuBackend()) == [TwoLevelTransport, SharedMemoryTransport]
    emulated = EmulatedGpuBackend(TARGETS["sm_90"])
    assert made(emulated) == [StagedTransport, TwoLevelTransport, SharedMemoryTransport]
