"""Collectives over several hosts in two levels: what can be added or shared within a host crosses the network once.

A host of k ranks of a group sends 1/k of what its ranks would send one by one, or 2/k of sums of 16-bit floats, which
are float32 until they are whole. The bits are those of one level: sums are trees over the index in the group
(`transport.summed`), and a host's ranks are a whole subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from torch import Tensor

from moaic.runtime.comm.pack import joined_view, split_view
from moaic.runtime.comm.shm_transport import blocks
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis, Transport, sum_dtype
from moaic.runtime.comm.transport_layer import TransportLayer

PIECE_BYTES: Final = 8 << 20
"""What goes through the levels at once, so that little memory is needed between them."""


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


class TwoLevelTransport(TransportLayer):
    """Sums and gathers in two levels where a group has them, all else in one."""

    def __init__(self, below: Transport, hosts: Sequence[str]) -> None:
        """`hosts` has the host of each rank."""
        super().__init__(below)
        self._hosts = hosts

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        found = levels(group, self._hosts)
        if found is None:
            self._below.all_reduce(tensor, group)
            return
        flat = tensor.view(-1)
        for (_, at), count in blocks(1, flat.numel(), _capacity(tensor, 1)):
            even = count // group.size * group.size if count * tensor.element_size() > ONE_TURN else 0
            if even:
                parts = SubAxis(0, even // group.size)
                mine = self.reduce_scatter(flat[at][:even], group, parts)
                flat[at][:even] = self.all_gather(mine, group, parts)
            if count > even:
                self._sum_everywhere_in_levels(flat[at][even:], found)

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        found = levels(group, self._hosts)
        if found is None:
            return self._below.reduce_scatter(tensor, group, sub_axis)
        shape, rows, columns = split_view(tensor.shape, sub_axis, group.size)
        whole = tensor.contiguous().view(rows, found.between.size, found.inside.size, columns)
        out = tensor.new_empty(rows, columns)
        for at, _ in blocks(rows, columns, _capacity(tensor, group.size)):
            wide = whole[at[0], :, :, at[1]].to(sum_dtype(tensor.dtype))
            of_host = self._below.reduce_scatter(wide, found.inside, SubAxis(2, 1))
            out[at] = self._below.reduce_scatter(of_host, found.between, SubAxis(1, 1)).view(out[at].shape)
        return out.view(shape)

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        found = levels(group, self._hosts)
        if found is None:
            return self._below.all_gather(tensor, group, sub_axis)
        shape, rows, columns = joined_view(tensor.shape, sub_axis, group.size)
        mine = tensor.contiguous().view(rows, 1, 1, columns)
        whole = tensor.new_empty(rows, found.between.size, found.inside.size, columns)
        for at, _ in blocks(rows, columns, _capacity(tensor, group.size)):
            of_hosts = self._below.all_gather(mine[at[0], :, :, at[1]], found.between, SubAxis(1, 1))
            whole[at[0], :, :, at[1]] = self._below.all_gather(of_hosts, found.inside, SubAxis(2, 1))
        return whole.view(shape)

    def _sum_everywhere_in_levels(self, flat: Tensor, found: Levels) -> None:
        wide = flat.to(sum_dtype(flat.dtype))
        self._below.all_reduce(wide, found.inside)
        self._below.all_reduce(wide, found.between)
        flat.copy_(wide)


def _capacity(tensor: Tensor, parts: int) -> int:
    """The number of elements of each of `parts` parts of a tensor that are a piece together."""
    return PIECE_BYTES // tensor.element_size() // parts
