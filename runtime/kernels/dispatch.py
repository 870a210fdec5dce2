"""Whether work outside compiled functions is a kernel's: between their calls, such as in a ring of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moaic.runtime.dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from moaic.runtime.kernels.launch import Tile


def tile_where_it_wins(kernel: str, tensor: Tensor, shape: Sequence[int] | None = None) -> Tile | None:
    """How a kernel is cut for tensors like this one; None where it was not measured to win on their device.

    `shape` is what the kernel's table calls one, where that is not the tensor's.
    """
    if tensor.device.type != "cuda":
        return None
    from moaic.runtime.kernels.operators import target_of
    from moaic.runtime.kernels.patterns.rewrite import measured_on
    from moaic.runtime.kernels.tiles import tile_of

    target = target_of(tensor.device)
    shape = tuple(tensor.shape if shape is None else shape)
    wins = measured_on(target)(kernel, shape, DTYPE_NAMES[tensor.dtype])
    return tile_of(kernel, target, shape, tensor.dtype) if wins else None
