"""A fix of Inductor's scheduler: a reader of a scattered buffer stays behind the scatter.

To fuse loops of different ranges the scheduler recomputes the reads of a node. PyTorch up to 2.13 then takes the names
of buffers before a scatter wrote to them, so that the reader may run before the scatter (fixed upstream by
pytorch/pytorch#177816 and #185873). The gradients of `interpolate` and `max_pool2d` below a convolution were zeros.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.scheduler import SchedulerNode
from torch.utils._ordered_set import OrderedSet

CACHE_TAG = "moai-scatter-order"
"""Kernels that were compiled without this order are not found in Inductor's cache."""

_recompute = SchedulerNode.recompute_size_and_body


def _recompute_in_order(self: Any, *args: Any, **kwargs: Any) -> None:
    added = OrderedSet(dep for dep in self.read_writes.reads if isinstance(dep, (StarDep, WeakDep)))
    _recompute(self, *args, **kwargs)
    self.set_read_writes(self.read_writes.with_read(added).rename(self.mutation_renames))


SchedulerNode.recompute_size_and_body = _recompute_in_order
