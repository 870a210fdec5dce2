"""Declaration of a decision of a plan, in the metadata of its field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DECLARED = "decision"
"""Key of a field's Decision in its metadata."""

YES_OR_NO = "`true`, `false`"


@dataclass(frozen=True, slots=True)
class Decision:
    """The declaration of a decision besides its type and default."""

    decides: str
    values: str
    logged: Callable[[Any], str]
    """Its part of the log line of a plan; empty for a value that is not logged."""
    also: Mapping[str, str]
    """Aliases of its values."""


def decision(
    default: Any,
    decides: str,
    *,
    values: str = "1, 2, …",
    logged: Callable[[Any], str] = lambda _: "",
    also: Mapping[str, str] | None = None,
) -> Any:
    """The field of a decision, an integer unless `values` says otherwise."""
    return field(default=default, metadata={DECLARED: Decision(decides, values, logged, also or {})})


def beyond_one(label: str) -> Callable[[int], str]:
    """Logs a number of parts greater than one."""
    return lambda parts: f"{label} : {parts}" if parts > 1 else ""
