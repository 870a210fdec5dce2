"""Checks of the lengths of blocks against the message that has them, before memory for the blocks is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import NoneType
from typing import Any, Final

from moaic.ir.types import DTYPE_BYTES
from moaic.runtime.protocol.commands import CODES, AnswerCode, Put
from moaic.runtime.protocol.limits import Refused

DIMS: Final = 64
"""The most that a tensor has."""

_PUT: Final = CODES[Put]

_FAILURE: Final = (int, str, str, str, str, bool, (list, NoneType))

_FIELDS: Final[Mapping[int, Sequence[Any]]] = {
    AnswerCode.HELLO: (int,),
    AnswerCode.VALUE: (list,),
    AnswerCode.DONE: (object,),
    AnswerCode.FAILED: _FAILURE,
    AnswerCode.RAISED: (int, *_FAILURE),
    AnswerCode.ADOPTED: (list, int, float, int, str),
    AnswerCode.NOT_CAPTURED: (str,),
    AnswerCode.POISONED: (int,),
}
"""The classes of an answer's fields, by its kind."""


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
    """Raise Refused unless a message of a worker is one of `AnswerCode`, with a block only where a VALUE states it."""
    try:
        request, kind, *data = body
        is_known = type(request) is int and all(map(isinstance, data, _FIELDS[kind]))
        is_known = is_known and len(data) == len(_FIELDS[kind])
        if kind in (AnswerCode.FAILED, AnswerCode.RAISED) and data[-1] is not None:
            is_known = is_known and [type(number) for number in data[-1]] == [int] * 3
        stated = [_bytes(*data[0])] if kind == AnswerCode.VALUE else [-1] * len(sizes)
    except (TypeError, ValueError, LookupError) as error:
        raise Refused(f"an answer that cannot be read: {error}") from error
    if not is_known:
        raise Refused(f"an answer of kind {kind} with other fields than such answers have")
    if list(sizes) != stated:
        raise Refused(f"an answer with blocks of {list(sizes)[:4]} bytes, it states {stated[:4]}")


def _bytes(dtype: str, shape: Sequence[int]) -> int:
    """The bytes of a tensor. Raises an error for anything but a known type and a list of sizes."""
    if len(shape) > DIMS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a shape of {len(shape):,} dims, of which one is no size, or more than {DIMS}")
    return prod(shape) * DTYPE_BYTES[dtype]
