"""Reading of received bodies: whatever is wrong in one, or would take too much memory, is refused."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Final, NoReturn, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from moaic.runtime.protocol.limits import Limits, Refused

DECODED_BYTES: Final = 64 << 20
"""Memory that the values of a body may take without being counted before."""

VALUE_BYTES: Final = 80
"""The most that a value takes, apart from the characters of a string: a map's share of an entry."""

OPEN_LISTS: Final = 1024
"""Lists that msgpack reads within each other; for each it allocates at once as many elements as the list claims."""

SMALL_BODY: Final = DECODED_BYTES // (VALUE_BYTES + 8 * OPEN_LISTS)
"""Bytes of a body whose values take less than DECODED_BYTES, whatever they are."""

CONTAINERS: Final = bytes((*range(0x80, 0xA0), 0xDC, 0xDD, 0xDE, 0xDF))
"""The first bytes of lists and maps."""


def read_body(data: bytearray, limits: Limits) -> Any:
    """The value of a received body. Raises Refused for whatever is wrong in it."""
    if len(data) > SMALL_BODY and _could_take(data) > DECODED_BYTES:
        _check_values(data, limits.values)
    heads = len(data) - len(data.translate(None, CONTAINERS))
    try:
        body = cast("Any", msgpack.unpackb(data, strict_map_key=False, ext_hook=_no_extension, max_ext_len=0))
    except Exception as error:
        raise Refused(f"a body that cannot be read: {type(error).__name__}: {error}") from error
    if heads > limits.depth:
        _check_depth(body, heads, limits.depth)
    return body


def _no_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _could_take(data: bytearray) -> int:
    """An upper bound of the bytes that the values of a body take, without reading it."""
    # Shorter lists have their length, of at most 15, in the first byte.
    open_lists = min(OPEN_LISTS, data.count(0xDC) + data.count(0xDD))
    return len(data) * (VALUE_BYTES + 8 * open_lists)


def _check_depth(body: Any, heads: int, most: int) -> None:
    """Raise Refused for more than `most` lists and maps within each other; there are at most `heads` of them."""
    level: list[Any] = [body]
    for left in range(most, -1, -1):
        # The class itself is compared, as isinstance takes longer than to read a value.
        inner = [each for each in level if each.__class__ is list or each.__class__ is dict]
        heads -= len(inner)
        if heads < left or not inner:
            return
        level = [*chain.from_iterable(map(_values, inner) if dict in map(type, inner) else inner)]
    raise Refused(f"a body of lists more than {most} deep")


def _values(container: list[Any] | dict[Any, Any]) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container


def _check_values(data: bytearray, most: int) -> None:
    """Raise Refused for a body that has or claims to have more than `most` values; makes none of them."""
    position, read, claimed = 0, 0, 1
    while read < claimed and position < len(data):
        skip, values, width = _FIRST_BYTES[data[position]]
        start = position + 1
        number = int.from_bytes(data[start : start + width], "big") if width else 1
        position = start + width + skip * number
        claimed += values * number
        read += 1
        if claimed > most:
            raise Refused(f"a body of more than {most:,} values")


def _first_byte(code: int) -> tuple[int, int, int]:
    """Bytes and values that follow a first byte, and the bytes of the number by which both are multiplied, or 0.

    msgpack refuses extensions, so what follows one does not matter.
    """
    if code < 0x90:
        return 0, 2 * (code & 0x0F) if code >= 0x80 else 0, 0
    if code < 0xC0:
        return (0, code & 0x0F, 0) if code < 0xA0 else (code & 0x1F, 0, 0)
    numbers = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    if code in numbers:
        return 1, 0, numbers[code]
    fixed = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    lists = {0xDC: (0, 1, 2), 0xDD: (0, 1, 4), 0xDE: (0, 2, 2), 0xDF: (0, 2, 4)}
    return lists.get(code, (fixed.get(code, 0), 0, 0))


_FIRST_BYTES: Final = [_first_byte(code) for code in range(256)]
