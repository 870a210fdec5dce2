"""A pass: a frozen dataclass whose fields are its options, in code and in text.

`pp=2:gpipe` names the pass `pp` with its first option 2 and its second `gpipe`; options that are not said have their
defaults.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module

AT_LEAST = "at_least"
"""In the metadata of a number among the options: the least that it may be; 2 unless said."""


class Pass(Protocol):
    """A function from modules to modules, by name."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def apply(self, module: Module) -> Module:
        """The module after the pass; raises Diagnostic where it cannot be had."""
        ...


def parse_pass(kind: type[Pass], text: str) -> Pass:
    """The pass of this kind with the options in `text`, joined by colons; raises Diagnostic for others."""
    options = _options(kind)
    given = text.split(":") if text else []
    if len(given) > len(options):
        takes = ", ".join(each.name for each in options) or "none"
        raise Diagnostic(f"pass {kind.name} has no option for `{given[len(options)]}`", hint=f"its options: {takes}")
    types = get_type_hints(kind)
    values = {each.name: _value(kind, each, types[each.name], word) for each, word in zip(options, given, strict=False)}
    make: Any = kind
    return make(**values)


def usage(kind: type[Pass]) -> str:
    """`pp=2:1f1b`: a pass with the defaults of its options, as far as they say anything."""
    defaults = [_spelled(each.default) for each in _options(kind)]
    while defaults and not defaults[-1]:
        defaults.pop()
    return "=".join(filter(None, (kind.name, ":".join(defaults))))


def _options(kind: type[Pass]) -> list[Field[Any]]:
    """The fields that can be written: words, numbers, yes or no."""
    types = get_type_hints(kind)
    found: Any = kind
    return [each for each in fields(found) if types[each.name] in (str, int, bool) or _words(types[each.name])]


def _words(type_: Any) -> tuple[str, ...]:
    return get_args(type_) if get_origin(type_) is Literal else ()


def _spelled(default: Any) -> str:
    assert default is not MISSING
    return str(default).lower() if isinstance(default, bool) else str(default)


def _value(kind: type[Pass], option: Field[Any], type_: Any, text: str) -> object:
    if type_ is str:
        return text
    if type_ is int:
        return _number(kind, option, text)
    words = ("true", "false") if type_ is bool else _words(type_)
    if text not in words:
        raise Diagnostic(f"{kind.name}={text} is not known", hint=f"choose one of {', '.join(words)}")
    return text == "true" if type_ is bool else text


def _number(kind: type[Pass], option: Field[Any], text: str) -> int:
    least = option.metadata.get(AT_LEAST, 2)
    if not text.isdigit() or int(text) < least:
        raise Diagnostic(f"pass {kind.name} needs a number of {option.name}, not `{text}`", hint=f"at least {least}")
    return int(text)
