"""Requests for a plan, read from option names and values, and from files that these name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from moaic.ir.errors import Diagnostic
from moaic.passes.config import DECISIONS, Request, type_of
from moaic.passes.schedules import SCHEDULES, is_schedule_name, is_schedule_text, parse_schedule
from moaic.passes.stage_shares import EQUAL, parse_shares


def parse_request(text: str) -> Request:
    """The Request in `dp=2,micro_batches=4`. Raises Diagnostic for an unknown name or value."""
    given: dict[str, str] = {}
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if text and not parts:
        raise Diagnostic(f"`{text}` has no plan option", hint="for example dp=2,micro_batches=4")
    for part in parts:
        name, sign, value = part.partition("=")
        if not sign:
            raise Diagnostic(
                f"plan option `{part}` is not of the form name=value", hint="for example dp=2,micro_batches=4"
            )
        if name.strip() in given:
            raise Diagnostic(f"plan option `{name.strip()}` stands twice", hint=f"leave out one of them in `{text}`")
        given[name.strip()] = value.strip()
    return request_from(dict(given))


def request_from(options: dict[str, object]) -> Request:
    """A Request from option names and values ("auto", None, numbers, booleans or their text). Raises Diagnostic.

    Shares of stages say how many stages there are.
    """
    known = {field.name for field in fields(Request)}
    for name in options:
        if name not in known:
            raise Diagnostic(f"there is no plan option `{name}`", hint=f"options are {', '.join(sorted(known))}")
    asked = Request(**{name: _value(name, value) for name, value in options.items()})  # pyright: ignore[reportArgumentType]
    if asked.pp is None and asked.stage_shares not in (None, EQUAL):
        return replace(asked, pp=len(parse_shares(asked.stage_shares)))
    return asked


def _value(name: str, value: object) -> object:
    if value is None or value == "auto":
        return None
    type_, text = type_of(name), str(value)
    if name == "schedule":
        return _schedule(text)
    if name == "stage_shares":
        if text != EQUAL:
            parse_shares(text)
        return text
    if type_ is int:
        if not text.isdigit() or int(text) < 1:
            raise Diagnostic(f"{name}={value} is not a positive whole number")
        return int(text)
    if type_ is bool:
        return _choice(name, text.lower(), {"true": True, "1": True, "false": False, "0": False})
    words = {word: word for word in get_args(type_)}
    return _choice(name, text.lower(), {**words, **DECISIONS[name].also})


def _schedule(value: str) -> str:
    """The name of a schedule, or its lists of actions, given as text or as the name of a file."""
    if is_schedule_name(value):
        return value
    if is_schedule_text(value):
        return str(parse_schedule(value))
    path = Path(value)
    if not path.is_file():
        names = ", ".join(SCHEDULES)
        raise Diagnostic(f"there is no schedule `{value}`", hint=f"choose one of {names}, or name a file with lists")
    return str(parse_schedule(path.read_text(encoding="utf-8")))


def _choice(name: str, value: str, choices: Mapping[str, object]) -> object:
    if value not in choices:
        raise Diagnostic(f"invalid value `{value}` for {name}", hint=f"choose one of {', '.join(choices)}")
    return choices[value]
