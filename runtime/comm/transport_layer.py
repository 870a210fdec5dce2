"""A transport over another one: the base of those that change some collectives and leave the others as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moaic.runtime.comm.transport import Group, SubAxis, Transport


class TransportLayer:
    """Leaves everything to the transport below."""

    def __init__(self, below: Transport) -> None:
        self._below = below

    @property
    def send_slots(self) -> int:
        return self._below.send_slots

    @property
    def is_asynchronous(self) -> bool:
        return self._below.is_asynchronous

    @property
    def can_be_recorded(self) -> bool:
        return self._below.can_be_recorded

    @property
    def can_be_given_up(self) -> bool:
        return self._below.can_be_given_up

    def agree(self, group: Group, choice: int) -> bool:
        return self._below.agree(group, choice)

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        self._below.all_reduce(tensor, group)

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return self._below.reduce_scatter(tensor, group, sub_axis)

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return self._below.all_gather(tensor, group, sub_axis)

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        return self._below.all_to_all(tensor, group, given, taken)

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        return self._below.begin_pass(tensors, group)

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        self._below.broadcast(tensor, group)

    def wait_sends(self) -> None:
        self._below.wait_sends()

    def abandon(self) -> None:
        self._below.abandon()
