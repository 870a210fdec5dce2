"""Parts of a tensor for a collective: cut along a digit of a dim, each whole in memory, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from moaic.runtime.comm.reshard import dense
from moaic.runtime.comm.transport import SubAxis
from moaic.runtime.kernels.dispatch import tile_where_it_wins


def digits(shape: Sequence[int], digit: SubAxis, count: int) -> tuple[tuple[int, ...], int, int]:
    """Shape of one of `count` parts, and the whole seen as (rows, count, columns)."""
    dim, stride = digit
    part = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    columns = stride * prod(shape[dim + 1 :])
    return part, prod(part) // columns if columns else 0, columns


def gathered_digits(shape: Sequence[int], digit: SubAxis, count: int) -> tuple[tuple[int, ...], int, int]:
    """Shape of the whole of `count` parts of this shape, and a part seen as (rows, columns)."""
    dim, stride = digit
    rows, columns = prod(shape[:dim]) * (shape[dim] // stride), stride * prod(shape[dim + 1 :])
    return (*shape[:dim], shape[dim] * count, *shape[dim + 1 :]), rows, columns


def in_parts(tensor: Tensor, digit: SubAxis, count: int) -> Tensor:
    """The parts [count, ...] along the digit; a view where memory is already in that order."""
    shape, rows, columns = digits(tensor.shape, digit, count)
    tile = tile_where_it_wins("exchange", tensor, (count, rows, columns)) if rows > 1 else None
    if tile is None:
        return dense(dense(tensor).view(rows, count, columns).transpose(0, 1)).view(count, *shape)
    from moaic.runtime.kernels.fused.exchange import pack

    return pack(tensor, *digit, count, tile)


def put_together(parts: Tensor, digit: SubAxis) -> Tensor:
    """The tensor that `in_parts` makes these parts of."""
    count = parts.shape[0]
    shape, rows, columns = gathered_digits(parts.shape[1:], digit, count)
    tile = tile_where_it_wins("exchange", parts, (count, rows, columns)) if rows > 1 else None
    if tile is None:
        return dense(dense(parts).view(count, rows, columns).transpose(0, 1)).view(shape)
    from moaic.runtime.kernels.fused.exchange import unpack

    return unpack(parts, *digit, tile)
