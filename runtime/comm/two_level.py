"""Collectives over several hosts in two levels: what can be added or shared within a host crosses the network once.

A host of k ranks of a group sends 1/k of what its ranks would send one by one. The bits are those of one level: sums
are trees over the index in the group (`transport.summed`), and a host's ranks are a whole subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from moaic.runtime.comm.pack import joined_view, split_view
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis, sum_dtype


@dataclass(frozen=True, slots=True)
class Levels:
    """A group as two."""

    inside: Group
    """The ranks of this host."""
    between: Group
    """The rank of each host that has the index of this one inside."""


def levels(group: Group, hosts: Sequence[str]) -> Levels | None:
    """The levels of a group, where `hosts` has the host of each rank.

    None unless each host has the same number of consecutive ranks of it, a power of two above one: only then are these
    a subtree of the sum, and worth it.
    """
    runs = [tuple(run) for _, run in groupby(group.ranks, key=lambda rank: hosts[rank])]
    size = len(runs[0])
    if len(runs) < 2 or size < 2 or size & (size - 1) or any(len(run) != size for run in runs):
        return None
    host, index = divmod(group.index, size)
    return Levels(Group(runs[host], index), Group(tuple(run[index] for run in runs), host))


class TwoLevelTransport(SharedMemoryTransport):
    """Sums and gathers in two levels where a group has them, all else in one."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self._hosts = mailbox.hosts

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        found = levels(group, self._hosts)
        if found is None:
            super().all_reduce(tensor, group)
            return
        wide = tensor.to(sum_dtype(tensor.dtype)).view(-1)
        even = wide.numel() // found.inside.size * found.inside.size if wide.nbytes > ONE_TURN else 0
        if even:
            parts = SubAxis(0, even // found.inside.size)
            part = super().reduce_scatter(wide[:even], found.inside, parts)
            super().all_reduce(part, found.between)
            wide[:even] = super().all_gather(part, found.inside, parts)
        if rest := wide[even:].numel():
            super().all_reduce(wide[-rest:], found.inside)
            super().all_reduce(wide[-rest:], found.between)
        if wide.dtype != tensor.dtype:
            tensor.view(-1).copy_(wide)

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        found = levels(group, self._hosts)
        if found is None:
            return super().reduce_scatter(tensor, group, sub_axis)
        shape, rows, columns = split_view(tensor.shape, sub_axis, group.size)
        wide = tensor.contiguous().to(sum_dtype(tensor.dtype))
        by_host = wide.view(rows, found.between.size, found.inside.size, columns)
        of_host = super().reduce_scatter(by_host, found.inside, SubAxis(2, 1))
        return super().reduce_scatter(of_host, found.between, SubAxis(1, 1)).view(shape).to(tensor.dtype)

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        found = levels(group, self._hosts)
        if found is None:
            return super().all_gather(tensor, group, sub_axis)
        shape, rows, columns = joined_view(tensor.shape, sub_axis, group.size)
        mine = tensor.contiguous().view(rows, 1, 1, columns)
        of_hosts = super().all_gather(mine, found.between, SubAxis(1, 1))
        return super().all_gather(of_hosts, found.inside, SubAxis(2, 1)).view(shape)
