"""Mistakes in the settings of a model: found by the usual value, or named beside the error of the library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any, Final, TypeGuard, cast

from moaic.ir.errors import Diagnostic

FULL_TRACE: Final = "MOAI_TRACEBACK=full prints the whole trace"

_LABEL = re.compile(r"(_id|_index|_value)$")
"""Whole numbers that stand for a token and count nothing."""

_SIZE = re.compile(r"(size|dim|heads|positions|embeddings)$")
"""Counts that tensors have as a size: none is left of a tensor of size 0."""


def check_setting(model: str, name: str, value: object, usual: Any) -> None:
    """Raise Diagnostic for a value that cannot be, as the value in the usual configuration tells."""
    before = _usual_value(usual, name)
    if not _is_number(before):
        return
    if not _is_finite(value):
        raise _wrong(model, name, value, before, "it is no finite number")
    if not isinstance(before, int) or before < 1 or _LABEL.search(name) or not _is_number(value):
        return
    if value < 0:
        raise _wrong(model, name, value, before, "a count is not negative")
    if value == 0 and _SIZE.search(name):
        raise _wrong(model, name, value, before, "a size is at least 1")


def impossible(model: str, settings: Mapping[str, object], usual: Any, error: Exception) -> Diagnostic:
    """The error of a library, which may be of any type, for settings of which no model can be made."""
    *_, reason = ("", *str(error).strip().splitlines())
    kind = f"{type(error).__name__}: " if isinstance(error, ArithmeticError | LookupError | TypeError) else ""
    values = {name: _usual_value(usual, name) for name in _at_fault(settings, usual, str(error))}
    given = ", ".join(f"{name}={settings[name]}" for name in values)
    known = ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)
    return Diagnostic(
        f"there is no `{model}`{given and f' with {given}'}: {kind}{reason.strip()}",
        hint=f"usual: {known}; {FULL_TRACE}" if known else FULL_TRACE,
    )


def _wrong(model: str, name: str, value: object, before: object, reason: str) -> Diagnostic:
    return Diagnostic(f"`{model}` cannot have {name}={value}: {reason}", hint=f"usual: --set {name}={before}")


def _at_fault(settings: Mapping[str, object], usual: Any, error: str) -> list[str]:
    """Settings that an error names by name or value; else those of an unusual type; else all."""
    words = set(re.findall(r"\w[\w.-]*", error))
    named = [name for name, value in settings.items() if words & {name, str(value)}]
    return named or [name for name in settings if _has_other_type(settings[name], usual, name)] or list(settings)


def _has_other_type(value: object, usual: Any, name: str) -> bool:
    before = _usual_value(usual, name)
    return before is not None and type(value) is not type(before)


def _usual_value(usual: Any, name: str) -> object:
    """The value of a setting; a configuration keeps some in a table, such as `rope_theta` in `rope_parameters`."""
    values = cast("Mapping[str, object]", vars(usual)).values()
    tables = (cast("Mapping[str, object]", each) for each in values if isinstance(each, dict))
    return getattr(usual, name, None) or next((each[name] for each in tables if name in each), None)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Whether a value is no number, or a finite one; text such as `nan` is how a command line gives the others."""
    if not isinstance(value, int | float | str):
        return True
    try:
        return isfinite(float(value))
    except (ValueError, OverflowError):
        return True
