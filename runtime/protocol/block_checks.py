"""Checks of the lengths of blocks against the message that has them, before memory for the blocks is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

from moaic.ir.types import DTYPE_BYTES
from moaic.runtime.protocol.commands import CODES, AnswerCode, Put
from moaic.runtime.protocol.limits import Refused

DIMS: Final = 64
"""The most that a tensor has."""

_PUT: Final = CODES[Put]


def check_commands(body: Any, sizes: Sequence[int]) -> None:
    """Raise Refused unless each block of a message to a worker is absent or has the bytes that its Put states."""
    if not sizes:
        return
    try:
        _, commands = body
        puts = [Put(*fields) for code, fields in commands if code == _PUT]
        stated = [(put.block, sizes[put.block], _bytes(put.dtype, put.shape)) for put in puts]
    except (TypeError, ValueError, LookupError) as error:
        raise Refused(f"blocks of commands that cannot be read: {error}") from error
    for block, size, expected in stated:
        if size not in (-1, expected):
            raise Refused(f"block {block} of {size:,} bytes, its command states {expected:,}")
    for block in set(range(len(sizes))).difference(block for block, _, _ in stated):
        raise Refused(f"block {block} of {sizes[block]:,} bytes, which no command uses")


def check_answer(body: Any, sizes: Sequence[int]) -> None:
    """Raise Refused unless a message of a worker is [request, kind, ...], with a block only where a VALUE states it."""
    try:
        _, kind, *data = body
        stated = [_bytes(*data[0])] if kind == AnswerCode.VALUE else [-1] * len(sizes)
    except (TypeError, ValueError, LookupError) as error:
        raise Refused(f"an answer that cannot be read: {error}") from error
    if list(sizes) != stated:
        raise Refused(f"an answer with blocks of {list(sizes)[:4]} bytes, it states {stated[:4]}")


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor. Raises an error for anything but a known type and a list of sizes."""
    if len(shape) > DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a shape of {len(shape):,} dims, of which one is no size, or more than {DIMS}")
    return prod(shape) * DTYPE_BYTES[dtype]
