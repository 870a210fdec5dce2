"""What workers do together: the collectives that programs, moves and reductions are made of, whoever carries the data.

Every rank of a group calls the same collective with tensors of equal shape. Sums are taken in the order of the group,
once per element, so all ranks hold the same bits, and the same whatever carries the data; sums of 16-bit floats are
taken in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from moaic.ir.types import HALF
from moaic.runtime.dtypes import DTYPES

ONE_TURN: Final = 1 << 15
"""Bytes up to which every rank simply reads every other rank's tensor and adds all up itself."""

_HALF: Final = frozenset(DTYPES[name] for name in HALF)


@dataclass(frozen=True, slots=True)
class Group:
    """Workers that do a collective together, in the order of their coordinate, and which of them this one is."""

    ranks: tuple[int, ...]
    index: int

    @staticmethod
    def of(ranks: Sequence[int], rank: int) -> Group:
        return Group(tuple(ranks), tuple(ranks).index(rank))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def after(self) -> int:
        """The next one's place, the ranks in a ring."""
        return (self.index + 1) % self.size

    @property
    def before(self) -> int:
        return (self.index - 1) % self.size

    @property
    def others(self) -> tuple[int, ...]:
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]


class SubAxis(NamedTuple):
    """Where a tensor is cut: the digit of local weight `stride` of `dim`."""

    dim: int
    stride: int


class Transport(Protocol):
    """The collectives of one worker. A group of one is left to the caller."""

    @property
    def send_slots(self) -> int:
        """How many of the slots that sends go through can be full before anybody takes what is in them."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether data is on its way while the worker goes on, and many small sums are better one."""
        ...

    @property
    def can_be_recorded(self) -> bool:
        """Whether a device that records can do collectives again."""
        ...

    @property
    def can_be_given_up(self) -> bool:
        """Whether a rank that waits for another learns that this one has given up what they do together."""
        ...

    def agree(self, group: Group, choice: int) -> bool:
        """Whether every rank of the group has made the same choice. Data that is on its way is not waited for."""
        ...

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        """Replaces a contiguous tensor by the sum over the group."""
        ...

    def reduce_scatter(self, tensor: Tensor, group: Group, digit: SubAxis) -> Tensor:
        """This rank's part along the digit of the sum over the group."""
        ...

    def all_gather(self, tensor: Tensor, group: Group, digit: SubAxis) -> Tensor:
        """The tensor of which each rank holds the part along the digit."""
        ...

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        """Gives rank i of the group part i along one digit; what the ranks gave, put together along another."""
        ...

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        """Begins to give contiguous tensors to the next rank; what comes back waits for those of the rank before.

        Until then the memory of what is given is shared, and nothing else may be begun.
        """
        ...

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        """Replaces the others' contiguous tensors by that of the group's first rank, which does not wait for them.

        Until `settle` its memory is shared with what is on its way, so nobody who asks `is_shared` overwrites it.
        """
        ...

    def wait_sends(self) -> None:
        """Returns once what this rank has sent may be overwritten."""
        ...

    def abandon(self) -> None:
        """Forgets what was sent while a recording was made that came to nothing."""
        ...


def summed(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum in order. `out` must not be one of the terms."""
    first, second, *rest = terms
    if rest and first.dtype in _HALF:
        wide = first.float()
        for term in terms[1:]:
            wide += term
        return wide.to(first.dtype) if out is None else out.copy_(wide)
    total = torch.add(first, second) if out is None else torch.add(first, second, out=out)
    for term in rest:
        total += term
    return total
