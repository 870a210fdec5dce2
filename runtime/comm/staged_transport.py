"""Collectives of GPUs whose data only the host can carry: tensors are copied to its memory first, and back after."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from moaic.runtime.comm.device_backend import DeviceBackend
from moaic.runtime.comm.transport import Group, SubAxis, Transport
from moaic.runtime.comm.transport_layer import TransportLayer


class StagedTransport(TransportLayer):
    """The transport below has tensors of the host alone, and sums there: the bits are those of CPU workers."""

    def __init__(self, below: Transport, backend: DeviceBackend) -> None:
        super().__init__(below)
        self._backend = backend

    def all_reduce(self, tensor: Tensor, group: Group) -> None:
        staged = self._staged(tensor)
        self._below.all_reduce(staged, group)
        tensor.copy_(staged, non_blocking=True)

    def reduce_scatter(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return self._backend.to_device(self._below.reduce_scatter(self._staged(tensor), group, sub_axis))

    def all_gather(self, tensor: Tensor, group: Group, sub_axis: SubAxis) -> Tensor:
        return self._backend.to_device(self._below.all_gather(self._staged(tensor), group, sub_axis))

    def all_to_all(self, tensor: Tensor, group: Group, given: SubAxis, taken: SubAxis) -> Tensor:
        return self._backend.to_device(self._below.all_to_all(self._staged(tensor), group, given, taken))

    def begin_pass(self, tensors: Sequence[Tensor], group: Group) -> Callable[[], list[Tensor]]:
        finish = self._below.begin_pass([self._staged(tensor) for tensor in tensors], group)
        return lambda: [self._backend.to_device(tensor) for tensor in finish()]

    def broadcast(self, tensor: Tensor, group: Group) -> None:
        staged = self._staged(tensor)
        self._below.broadcast(staged, group)
        if group.index:
            tensor.copy_(staged, non_blocking=True)

    def _staged(self, tensor: Tensor) -> Tensor:
        """A contiguous copy in memory of the host, once all that the device has to do for it is done."""
        staged = self._backend.staging(tensor.numel() * tensor.element_size()).view(tensor.dtype).view(tensor.shape)
        return staged.copy_(tensor)
