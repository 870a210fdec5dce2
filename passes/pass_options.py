"""A pass: a frozen dataclass whose fields are its options, in code and in text.

`pp=2:gpipe` is the pass `pp` with its first option 2 and its second `gpipe`; omitted options have their defaults.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin, get_type_hints

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module

AT_LEAST = "at_least"
"""Key of the minimum of an integer option in its metadata; 2 unless given."""


class Pass(Protocol):
    """A named function from modules to modules."""

    name: ClassVar[str]
    summary: ClassVar[str]

    def apply(self, module: Module) -> Module:
        """The module after the pass; raises Diagnostic where the pass is not possible."""
        ...


def parse_pass(pass_type: type[Pass], text: str) -> Pass:
    """The pass with the options in `text`, joined by colons; raises Diagnostic for an invalid option."""
    options = _options(pass_type)
    given = text.split(":") if text else []
    if len(given) > len(options):
        takes = ", ".join(each.name for each in options) or "none"
        raise Diagnostic(
            f"pass {pass_type.name} has no option for `{given[len(options)]}`", hint=f"its options: {takes}"
        )
    types = get_type_hints(pass_type)
    values = {
        each.name: _value(pass_type, each, types[each.name], word) for each, word in zip(options, given, strict=False)
    }
    make: Any = pass_type
    return make(**values)


def usage(pass_type: type[Pass]) -> str:
    """A pass with the non-empty defaults of its options, such as `pp=2:1f1b`."""
    defaults = [_spelled(each.default) for each in _options(pass_type)]
    while defaults and not defaults[-1]:
        defaults.pop()
    return "=".join(filter(None, (pass_type.name, ":".join(defaults))))


def _options(pass_type: type[Pass]) -> list[Field[Any]]:
    """The fields that are options: strings, literals, integers and booleans."""
    types = get_type_hints(pass_type)
    pass_class: Any = pass_type
    return [each for each in fields(pass_class) if types[each.name] in (str, int, bool) or _words(types[each.name])]


def _words(type_: Any) -> tuple[str, ...]:
    return get_args(type_) if get_origin(type_) is Literal else ()


def _spelled(default: Any) -> str:
    assert default is not MISSING
    return str(default).lower() if isinstance(default, bool) else str(default)


def _value(pass_type: type[Pass], option: Field[Any], type_: Any, text: str) -> object:
    if type_ is str:
        return text
    if type_ is int:
        return _number(pass_type, option, text)
    words = ("true", "false") if type_ is bool else _words(type_)
    if text not in words:
        raise Diagnostic(f"invalid value `{text}` for {pass_type.name}", hint=f"choose one of {', '.join(words)}")
    return text == "true" if type_ is bool else text


def _number(pass_type: type[Pass], option: Field[Any], text: str) -> int:
    least = option.metadata.get(AT_LEAST, 2)
    if not text.isdigit() or int(text) < least:
        raise Diagnostic(
            f"pass {pass_type.name} needs a number of {option.name}, not `{text}`", hint=f"at least {least}"
        )
    return int(text)
