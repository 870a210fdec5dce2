"""Lengths of blocks against the messages that have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from moaic.runtime.protocol.block_checks import check_answer, check_commands
from moaic.runtime.protocol.commands import AnswerCode, Command, Free, Put, to_wire
from moaic.runtime.protocol.frames import decode, encode
from moaic.runtime.protocol.limits import Refused


def message(*commands: Command) -> Any:
    return decode(encode([7, to_wire(commands)]))


def put(block: int, dtype: str = "f32", shape: Any = (2, 3)) -> Put:
    return Put(-1, 1, dtype, shape, block)


def test_blocks_of_puts_have_the_bytes_of_their_shapes_or_are_absent() -> None:
    check_commands(message(Free(-1, [1])), [])
    check_commands(message(put(0), Free(-1, [1]), put(1, "bf16", ()), put(2, shape=(0, 4))), [24, 2, 0])
    check_commands(message(put(0), put(1)), [-1, 24])


@pytest.mark.parametrize(
    ("body", "sizes", "reason"),
    [
        (message(put(0)), [25], "block 0 of 25 bytes, its command states 24"),
        (message(put(0)), [2**62], "its command states 24"),
        (message(put(0)), [24, 8], "block 1 of 8 bytes, which no command uses"),
        (message(Free(-1, [1])), [8], "block 0 of 8 bytes, which no command uses"),
        (message(put(3)), [24], "cannot be read"),
        (message(put(0, "f31")), [24], "cannot be read"),
        (message(put(0, shape=[2.5])), [24], "cannot be read"),
        (message(put(0, shape=[-1])), [24], "cannot be read"),
        (message(put(0, shape=[1] * 65)), [4], "cannot be read"),
        ([7, [[0, [1, 2]]]], [24], "cannot be read"),
        ([7, [[0, 5]]], [24], "cannot be read"),
        (None, [24], "cannot be read"),
        ({1: 2, 3: 4}, [24], "cannot be read"),
    ],
)
def test_other_blocks_of_commands_are_refused(body: Any, sizes: Sequence[int], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        check_commands(body, sizes)


def test_a_value_has_one_block_of_its_bytes() -> None:
    check_answer([1, AnswerCode.VALUE, ["f64", [3]]], [24])
    check_answer([1, AnswerCode.DONE, {"pid": 5}], [-1])
    check_answer([-1, AnswerCode.HELLO, 5], [])


@pytest.mark.parametrize(
    ("body", "sizes", "reason"),
    [
        ([1, AnswerCode.VALUE, ["f64", [3]]], [2**40], r"blocks of \[1099511627776\] bytes, it states \[24\]"),
        ([1, AnswerCode.VALUE, ["f64", [3]]], [-1], r"blocks of \[-1\] bytes"),
        ([1, AnswerCode.VALUE, ["f64", [3]]], [], r"blocks of \[\] bytes"),
        ([1, AnswerCode.DONE, None], [24], r"blocks of \[24\] bytes"),
        ([1, AnswerCode.VALUE], [24], "cannot be read"),
        ([1, AnswerCode.VALUE, ["f64", 3]], [24], "cannot be read"),
        ([1], [], "cannot be read"),
        (7, [], "cannot be read"),
    ],
)
def test_other_blocks_of_answers_are_refused(body: Any, sizes: Sequence[int], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        check_answer(body, sizes)
