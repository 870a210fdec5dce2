"""Parts of a tensor for a collective: cut along a sub-axis of a dim, each part contiguous, and joined again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from moaic.runtime.comm.reshard import dense
from moaic.runtime.comm.transport import SubAxis
from moaic.runtime.kernels.dispatch import tile_where_it_wins


def split_view(shape: Sequence[int], sub_axis: SubAxis, count: int) -> tuple[tuple[int, ...], int, int]:
    """The shape of one of `count` parts, and the rows and columns of the whole as a view (rows, count, columns)."""
    dim, stride = sub_axis
    part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    columns = stride * prod(shape[dim + 1 :])
    return part, prod(part) // columns if columns else 0, columns


def joined_view(shape: Sequence[int], sub_axis: SubAxis, count: int) -> tuple[tuple[int, ...], int, int]:
    """The shape that `count` parts of this shape join to, and the rows and columns of a part as a matrix."""
    dim, stride = sub_axis
    rows, columns = prod(shape[:dim]) * (shape[dim] // stride), stride * prod(shape[dim + 1 :])
    return (*shape[:dim], shape[dim] * count, *shape[dim + 1 :]), rows, columns


def in_parts(tensor: Tensor, sub_axis: SubAxis, count: int) -> Tensor:
    """The parts [count, ...] along the sub-axis; a view if the memory is already in that order."""
    shape, rows, columns = split_view(tensor.shape, sub_axis, count)
    tile = tile_where_it_wins("exchange", tensor, (count, rows, columns)) if rows > 1 else None
    if tile is None:
        return dense(dense(tensor).view(rows, count, columns).transpose(0, 1)).view(count, *shape)
    from moaic.runtime.kernels.fused.exchange import pack

    return pack(tensor, *sub_axis, count, tile)


def put_together(parts: Tensor, sub_axis: SubAxis) -> Tensor:
    """The inverse of `in_parts`."""
    count = parts.shape[0]
    shape, rows, columns = joined_view(parts.shape[1:], sub_axis, count)
    tile = tile_where_it_wins("exchange", parts, (count, rows, columns)) if rows > 1 else None
    if tile is None:
        return dense(dense(parts).view(count, rows, columns).transpose(0, 1)).view(shape)
    from moaic.runtime.kernels.fused.exchange import unpack

    return unpack(parts, *sub_axis, tile)
