"""Collectives between workers over process groups of torch.distributed: NCCL or RCCL between GPUs, gloo over the host.

Each group of ranks has a process group, made at its first use. Making one blocks until every rank takes part, which
does not deadlock, as all ranks communicate in the order of one list.

Process groups only carry bytes. Sums are computed here, in the order of `summed`. A backend's own sum follows its
rings and trees, so two groups that sum the same copies would round differently. The volume is that of a ring: each rank
gets one segment from all others and sends its sum to all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, distributed

from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.comm.pack import in_parts, put_together
from moaic.runtime.comm.rendezvous import PATIENCE, Meet
from moaic.runtime.comm.reshard import dense
from moaic.runtime.comm.shm_slots import PeerLost
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis, summed
from moaic.runtime.host.gpus import CPU
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.wire import bytes_of

TURN: Final = 64 << 20
"""Bytes summed at a time: the memory that a sum needs beside its operand."""


Maker = Callable[[Group], Any]
"""Makes a process group, together with the other ranks of the group."""

Alike = Callable[[Sequence[int], int], bool]
"""Whether these ranks, which all call it, have made the same choice as this one; it uses no process group."""


class GroupTransport:
    """The collectives of one worker."""

    def __init__(
        self, make: Maker, alike: Alike, backend: DeviceBackend, *, stages: bool, can_be_recorded: bool = False
    ) -> None:
        """With `stages`, the process groups carry tensors of the host, and those of the device are copied there."""
        self._make = make
        self._alike = alike
        self._backend = backend
        self._stages = stages
        self.can_be_recorded = can_be_recorded
        self._groups: dict[tuple[int, ...], Any] = {}
        self._sending: deque[tuple[Any, Tensor]] = deque()

    @property
    def send_slots(self) -> int:
        # Two ranks that first send to each other would deadlock: each would make its own group and wait for the other.
        return 0

    @property
    def is_asynchronous(self) -> bool:
        return True

    @property
    def can_be_given_up(self) -> bool:
        return False

    def agree(self, group: Group, choice: int) -> bool:
        return self._alike(group.others, choice)

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= ONE_TURN:
            flat.copy_(summed(self._gathered(flat, group).unbind(0)))
            return
        most = TURN // flat.element_size()
        for start in range(0, flat.numel(), most):
            piece = flat.narrow(0, start, min(most, flat.numel() - start))
            length = -(-piece.numel() // group.size)
            segments = _padded(piece, group.size * length).view(group.size, length)
            mine = summed(self._exchanged(segments, group).unbind(0))
            piece.copy_(self._gathered(mine, group).view(-1).narrow(0, 0, piece.numel()))

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return summed(self._exchanged(in_parts(tensor, sub_axis, group.size), group).unbind(0))

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return put_together(self._gathered(dense(tensor), group), sub_axis)

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        return put_together(self._exchanged(in_parts(tensor, given, group.size), group), taken)

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        """By an all-to-all that is empty for all other ranks, so that no order of sends and receives can deadlock."""

        def run(given: list[Tensor]) -> list[Tensor]:
            return [self._handed_on(tensor, group) for tensor in given]

        return self._backend.run_async(run, list(tensors))

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        block = bytes_of(dense(tensor))
        if not block.numel():
            return
        is_first = group.index == 0
        carried = self._backend.staging(block.numel()) if self._stages else block
        if self._stages and is_first:
            carried.copy_(block)
        with _together():
            work = self._group(group).broadcast([carried], _from_the_first())
            if not is_first:
                work.wait()
        if is_first:
            # Keeps the storage of `tensor` in use, so that `is_shared` is true until the send is done.
            self._sending.append((work, carried))
            if not self._backend.is_recording:
                self._forget_done()
        elif self._stages:
            block.copy_(carried)

    def wait_sends(self) -> None:
        while self._sending:
            work, _ = self._sending.popleft()
            with _together():
                work.wait()

    def abandon(self) -> None:
        self._sending.clear()

    def _forget_done(self) -> None:
        while self._sending and self._sending[0][0].is_completed():
            work, _ = self._sending.popleft()
            with _together():
                # A work of NCCL holds the tensor until it is waited for.
                work.wait()

    def _gathered(self, mine: Tensor, group: Group) -> Tensor:
        """The tensors of all ranks of the group, each of the shape of `mine`, stacked along a new first dim."""
        whole = mine.new_empty(group.size, *mine.shape)
        return self._carried(whole, mine, lambda out, given: self._group(group)._allgather_base(out, given))

    def _exchanged(self, parts: Tensor, group: Group) -> Tensor:
        """Send part i along the first dim to rank i of the group; return the parts that the ranks sent here."""
        whole = torch.empty_like(parts)
        return self._carried(whole, parts, lambda out, given: self._group(group).alltoall_base(out, given, [], []))

    def _handed_on(self, tensor: Tensor, group: Group) -> Tensor:
        """Send `tensor` to the next rank of the group; return the tensor of the previous rank."""
        taken, given = [0] * group.size, [0] * group.size
        taken[group.before] = given[group.after] = tensor.numel() * tensor.element_size()

        def start(out: Tensor, sent: Tensor) -> Any:
            return self._group(group).alltoall_base(out, sent, taken, given)

        return self._carried(torch.empty_like(tensor), tensor, start)

    def _carried(self, out: Tensor, given: Tensor, start: Callable[[Tensor, Tensor], Any]) -> Tensor:
        """Fill `out` by the collective that `start` begins on contiguous tensors; return it."""
        if not out.numel():
            return out
        theirs, mine = bytes_of(out), bytes_of(given)
        landing = self._backend.staging(theirs.numel()) if self._stages else theirs
        with _together():
            start(landing, mine.cpu() if self._stages else mine).wait()
        if self._stages:
            theirs.copy_(landing)
        return out

    def _group(self, group: Group) -> Any:
        found = self._groups.get(group.ranks)
        if found is None:
            found = self._groups[group.ranks] = self._make(group)
        return found


def _padded(flat: Tensor, count: int) -> Tensor:
    """`flat`, padded with zeros to `count` elements."""
    if flat.numel() == count:
        return flat
    padded = flat.new_zeros(count)
    padded.narrow(0, 0, flat.numel()).copy_(flat)
    return padded


def _from_the_first() -> Any:
    options = distributed.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


@contextmanager
def _together() -> Generator[None]:
    """Raise PeerLost for an error of the backend: it is the consequence of a lost peer."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


def group_transport(carrier: Carrier, meet: Meet, address: str, alike: Alike, backend: DeviceBackend) -> GroupTransport:
    """The transport over process groups; gloo listens on `address`, which is one of this host."""
    make = _MAKERS[carrier](address)

    def made(group: Group) -> Any:
        with _together():
            return make(meet(group.ranks), group.index, group.size)

    stages = carrier is Carrier.GLOO and backend.device.type != CPU
    return GroupTransport(made, alike, backend, stages=stages, can_be_recorded=carrier is Carrier.NCCL)


def _gloo(address: str) -> Callable[[Any, int, int], Any]:
    backend: Any = distributed.ProcessGroupGloo
    device = backend.create_device(hostname=address)

    def make(store: Any, rank: int, size: int) -> Any:
        options = backend._Options()
        options._devices, options._threads, options._timeout = [device], 1, PATIENCE
        return backend(store, rank, size, options)

    return make


def _nccl(address: str) -> Callable[[Any, int, int], Any]:
    # A build of torch for CPUs does not have it.
    backend: Any = vars(distributed)["ProcessGroupNCCL"]

    def make(store: Any, rank: int, size: int) -> Any:
        options = backend.Options(is_high_priority_stream=True)
        options._timeout = PATIENCE
        return backend(store, rank, size, options)

    return make


_MAKERS: Final = {Carrier.GLOO: _gloo, Carrier.NCCL: _nccl}
