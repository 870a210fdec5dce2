"""Collectives between the workers of one host over shared memory.

Data passes through slots of fixed size; larger tensors take several turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from moaic.runtime.comm.pack import joined_view, split_view
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.transport import ONE_TURN, Group, SubAxis, summed
from moaic.runtime.protocol.shared_memory import AHEAD, SLOT_BYTES
from moaic.runtime.protocol.tensor_parts import cut, join

ALIGNMENT: Final = 64


class SharedMemoryTransport:
    """A send copies into a slot at once, so `wait_sends` has nothing to wait for."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._box = mailbox

    @property
    def send_slots(self) -> int:
        return len(AHEAD)

    @property
    def is_asynchronous(self) -> bool:
        return False

    @property
    def can_be_recorded(self) -> bool:
        return False

    @property
    def can_be_given_up(self) -> bool:
        return True

    def agree(self, group: Group, choice: int) -> bool:
        return self._box.agree(group.others, choice)

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= ONE_TURN:
            self._sum_everywhere(flat, group)
        else:
            self._sum_in_segments(flat, group)

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        shape, rows, columns = split_view(tensor.shape, sub_axis, group.size)
        whole = tensor.contiguous().view(rows, group.size, columns)
        out = tensor.new_empty(rows, columns)
        for at, count in blocks(rows, columns, _capacity(tensor, group.size - 1)):
            slot = self._box.slot(tensor.dtype)
            for i, index in enumerate(i for i in range(group.size) if i != group.index):
                slot[i * count : (i + 1) * count].view(out[at].shape).copy_(whole[at[0], index, at[1]])
            self._box.post(group.others, count * tensor.element_size(), apart=True)
            self._add(out[at], whole[at[0], group.index, at[1]], group, count)
            self._box.give_back(group.others)
        return out.view(shape)

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        shape, rows, columns = joined_view(tensor.shape, sub_axis, group.size)
        mine = tensor.contiguous().view(rows, columns)
        whole = tensor.new_empty(rows, group.size, columns)
        for at, count in blocks(rows, columns, _capacity(tensor, 1)):
            self._box.slot(tensor.dtype)[:count].view(mine[at].shape).copy_(mine[at])
            self._box.post(group.others, count * tensor.element_size())
            whole[at[0], group.index, at[1]].copy_(mine[at])
            for index, peer in enumerate(group.ranks):
                if index != group.index:
                    slot = self._box.take(peer, tensor.dtype)
                    whole[at[0], index, at[1]].copy_(slot[:count].view(mine[at].shape))
            self._box.give_back(group.others)
        return whole.view(shape)

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        parts = [cut(tensor, *given, group.size, index) for index in range(group.size)]
        sent = [part.contiguous().view(-1) for part in parts]
        received = [torch.empty_like(sent[0]) for _ in parts]
        received[group.index] = sent[group.index]
        for (_, at), count in blocks(1, sent[0].numel(), _capacity(sent[0], group.size - 1)):
            slot = self._box.slot(sent[0].dtype)
            for i, index in enumerate(i for i in range(group.size) if i != group.index):
                slot[i * count : (i + 1) * count].copy_(sent[index][at])
            self._box.post(group.others, count * tensor.element_size(), apart=True)
            for index, peer in enumerate(group.ranks):
                if index != group.index:
                    received[index][at].copy_(self._taken(peer, index, group, sent[0].dtype, count))
            self._box.give_back(group.others)
        return join([part.view(parts[0].shape) for part in received], *taken)

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        """Post the first piece now, and each further one when the previous rank's piece has come: two slots suffice."""
        received = [torch.empty_like(tensor) for tensor in tensors]
        given = (piece for tensor in tensors for piece in _pieces(tensor))
        after, before = group.ranks[group.after], group.ranks[group.before]

        def post_next() -> None:
            piece = next(given, None)
            if piece is not None:
                self._box.slot(piece.dtype)[: piece.numel()].copy_(piece)
                self._box.post((after,), piece.nbytes)

        def finish() -> list[Tensor]:
            for piece in (piece for tensor in received for piece in _pieces(tensor)):
                piece.copy_(self._box.take(before, piece.dtype)[: piece.numel()])
                self._box.give_back((before,))
                post_next()
            return received

        post_next()
        return finish

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        flat = tensor.contiguous().view(-1)
        for (_, at), count in blocks(1, flat.numel(), _capacity(flat, 1)):
            if group.index == 0:
                self._box.slot(tensor.dtype, AHEAD)[:count].copy_(flat[at])
                self._box.post(group.others, count * tensor.element_size())
            else:
                flat[at].copy_(self._box.take(group.ranks[0], tensor.dtype)[:count])
                self._box.give_back(group.ranks[:1])

    def wait_sends(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _sum_everywhere(self, flat: Tensor, group: Group) -> None:
        count = flat.numel()
        self._box.slot(flat.dtype)[:count].copy_(flat)
        self._box.post(group.others, flat.nbytes)
        terms = [flat if peer == self._box.rank else self._box.take(peer, flat.dtype)[:count] for peer in group.ranks]
        flat.copy_(summed(terms))
        self._box.give_back(group.others)

    def _sum_in_segments(self, flat: Tensor, group: Group) -> None:
        """Each rank sums one segment per turn and posts the result to the others."""
        even = -(-flat.numel() // group.size)
        most = -(-even * flat.element_size() // ALIGNMENT) * ALIGNMENT // flat.element_size()
        length = min(most, _capacity(flat, group.size - 1))
        for start in range(0, flat.numel(), length * group.size):
            segments = [flat[start + i * length : start + (i + 1) * length] for i in range(group.size)]
            self._post_terms(segments, group, length)
            mine = segments[group.index]
            result = self._box.slot(flat.dtype)[: mine.numel()]
            self._add(result, mine, group, length)
            self._box.give_back(group.others)
            self._box.post(group.others, mine.nbytes)
            mine.copy_(result)
            for index, peer in enumerate(group.ranks):
                if index != group.index:
                    segments[index].copy_(self._box.take(peer, flat.dtype)[: segments[index].numel()])
            self._box.give_back(group.others)

    def _post_terms(self, segments: Sequence[Tensor], group: Group, length: int) -> None:
        slot = self._box.slot(segments[0].dtype)
        for i, index in enumerate(i for i in range(group.size) if i != group.index):
            slot[i * length : i * length + segments[index].numel()].copy_(segments[index])
        self._box.post(group.others, length * segments[0].element_size(), apart=True)

    def _add(self, out: Tensor, mine: Tensor, group: Group, length: int) -> None:
        """Write the sum of `mine` and of the terms that the others posted for the same segment into `out`."""
        terms = [
            mine
            if index == group.index
            else self._taken(peer, index, group, mine.dtype, length)[: mine.numel()].view(mine.shape)
            for index, peer in enumerate(group.ranks)
        ]
        summed(terms, out)

    def _taken(self, peer: int, index: int, group: Group, dtype: torch.dtype, length: int) -> Tensor:
        """This rank's share of the slot of rank `index`, which has one share per reader, in the order of the group."""
        share = group.index - (group.index > index)
        return self._box.take(peer, dtype)[share * length : (share + 1) * length]


def _capacity(tensor: Tensor, shares: int) -> int:
    """The number of elements of `tensor` that fit into one of `shares` equal shares of a slot."""
    return SLOT_BYTES // max(1, shares) // ALIGNMENT * ALIGNMENT // tensor.element_size()


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor in pieces, each of which fits into a slot."""
    flat = tensor.view(-1)
    return (flat[at] for (_, at), _ in blocks(1, flat.numel(), _capacity(flat, 1)))


def blocks(rows: int, columns: int, capacity: int) -> Iterator[tuple[tuple[slice, slice], int]]:
    """Rectangles of at most `capacity` elements that tile rows x columns, each with its number of elements."""
    if rows * columns == 0:
        return
    wide = min(columns, capacity)
    high = max(1, capacity // columns)
    for row in range(0, rows, high):
        for column in range(0, columns, wide):
            tall, broad = min(high, rows - row), min(wide, columns - column)
            yield (slice(row, row + tall), slice(column, column + broad)), tall * broad
