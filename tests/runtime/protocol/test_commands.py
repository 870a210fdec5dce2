"""Commands on the wire: what a worker reads is what the controller wrote."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from moaic.runtime.protocol.commands import (
    CODES,
    Command,
    Fetch,
    Operate,
    Request,
    Run,
    from_wire,
    is_request,
    kind_of,
    name_of,
    to_wire,
)
from moaic.runtime.protocol.frames import decode, encode

KINDS: tuple[Any, ...] = get_args(Command)


@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_a_command_survives_the_wire(kind: Any) -> None:
    command = kind(*range(len(kind._fields)))
    read = from_wire(decode(encode(to_wire([command])))[0])
    assert type(read) is kind
    assert read == command


def test_the_wire_has_the_code_and_the_fields() -> None:
    command = Operate(line=3, number=1, operands=[5, 6], scalars=(2.5, None), outputs=[7])
    assert decode(encode(to_wire([command]))) == [[CODES[Operate], [3, 1, [5, 6], [2.5, None], [7]]]]


def test_requests_are_the_commands_with_a_request_number() -> None:
    assert set(get_args(Request)) == {kind for kind in KINDS if "request" in kind._fields}
    assert is_request(Fetch(0, 1, None, [0]))
    assert not is_request(Run(0, 1, [], [], None))


def test_every_code_stands_for_one_class() -> None:
    assert [kind_of(code) for code in CODES.values()] == list(CODES)
    assert kind_of(-1) is None
