"""Whether work outside compiled functions is a kernel's: between their calls, such as in a ring of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moaic.runtime.schema import DTYPE_NAMES

if TYPE_CHECKING:
    from moaic.runtime.kernels.launch import Tile


def tile_where_it_wins(kernel: str, tensor: Tensor) -> Tile | None:
    """How a kernel is cut for tensors like this one; None where it was not measured to win on their device."""
    if tensor.device.type != "cuda":
        return None
    from moaic.runtime.kernels.operators import target_of
    from moaic.runtime.kernels.rewrite import measured_on
    from moaic.runtime.kernels.tiles import tile_of

    target = target_of(tensor.device)
    wins = measured_on(target)(kernel, tuple(tensor.shape), DTYPE_NAMES[tensor.dtype])
    return tile_of(kernel, target, tensor.shape, tensor.dtype) if wins else None
