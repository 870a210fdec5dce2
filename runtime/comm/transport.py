"""The interface of transports: the collectives that programs, resharding and reductions call.

Every rank of a group calls the same collective with tensors of equal shape. Sums are computed by a tree over the index
in the group (`summed`), so all ranks get the same bits, whatever the transport. Sums of 16-bit floats are computed in
float32 and rounded once.
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
"""Largest tensor, in bytes, of which every rank reads all copies and sums them itself."""

_HALF: Final = frozenset(DTYPES[name] for name in HALF)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of a collective, in the order of their coordinate, and the index of this worker among them."""

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
        """The index of the next rank in the ring of the group."""
        return (self.index + 1) % self.size

    @property
    def before(self) -> int:
        return (self.index - 1) % self.size

    @property
    def others(self) -> tuple[int, ...]:
        return self.ranks[: self.index] + self.ranks[self.index + 1 :]


class SubAxis(NamedTuple):
    """A factor of a dim along which a tensor is cut: index i of `dim` is in part (i // stride) % count."""

    dim: int
    stride: int


class Transport(Protocol):
    """The collectives of one worker. The caller skips a group of one."""

    @property
    def send_slots(self) -> int:
        """The number of sends that can be posted before one blocks until it is received."""
        ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether collectives are asynchronous; if so, small all-reduces are bucketed."""
        ...

    @property
    def can_be_recorded(self) -> bool:
        """Whether a CUDA graph can capture the collectives and replay them."""
        ...

    @property
    def can_be_given_up(self) -> bool:
        """Whether a rank can give a command up: ranks that wait for it in a collective then raise GivenUp."""
        ...

    def agree(self, group: Group, choice: int) -> bool:
        """Whether every rank of the group has made the same choice. Does not wait for data in flight."""
        ...

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        """Replace a contiguous tensor by its sum over the group."""
        ...

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        """Return this rank's part along the sub-axis of the sum over the group."""
        ...

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        """Return the tensor of which each rank holds a part along the sub-axis."""
        ...

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        """Send part i along one sub-axis to rank i; return the received parts, joined along another."""
        ...

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        """Begin to send contiguous tensors to the next rank; the returned function waits for the previous rank's.

        Until it returns, the memory of the sent tensors is in use, and no other collective may begin.
        """
        ...

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        """Replace the contiguous tensors of the others by that of the group's first rank, which does not wait for them.

        Until `wait_sends` the send holds a reference to its memory, so that `is_shared` is true of it.
        """
        ...

    def wait_sends(self) -> None:
        """Wait until the tensors that this rank has sent may be overwritten."""
        ...

    def abandon(self) -> None:
        """Drop the sends of a failed capture of a CUDA graph."""
        ...


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which several terms of a dtype are added."""
    return torch.float32 if dtype in _HALF else dtype


def summed(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of the terms by a balanced binary tree over their order, cut at the largest power of two below the count.

    Aligned halves, quarters … of the terms that are summed so first give the same bits: hosts may add up what they hold
    before they exchange it. `out` must not be one of the terms.
    """
    dtype = terms[0].dtype
    if len(terms) > 2 and sum_dtype(dtype) != dtype:
        wide = _tree(terms, sum_dtype(dtype))
        return wide.to(dtype) if out is None else out.copy_(wide)
    return _tree(terms, dtype, out)


def _tree(terms: Sequence[Tensor], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The sum of two or more terms, in this dtype."""
    middle = 1 << (len(terms) - 1).bit_length() - 1
    later = terms[-1] if middle == len(terms) - 1 else _tree(terms[middle:], dtype)
    if middle == 1:
        return torch.add(terms[0].to(dtype), later, out=out)
    return _tree(terms[:middle], dtype, out).add_(later)
