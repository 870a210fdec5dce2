"""What is declared of a decision of a plan, in the field that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

DECLARED = "decision"
"""In the metadata of a field: its Decision."""

YES_OR_NO = "`true`, `false`"


@dataclass(frozen=True, slots=True)
class Decision:
    """What is declared of a decision beside its type and its default."""

    decides: str
    values: str
    logged: Callable[[Any], str]
    """Its part of the line that a plan is logged as; empty for a value that is not said there."""
    also: Mapping[str, str]
    """Other words for its values."""


def decision(
    default: Any,
    decides: str,
    *,
    values: str = "1, 2, …",
    logged: Callable[[Any], str] = lambda _: "",
    also: Mapping[str, str] | None = None,
) -> Any:
    """The field of a decision that takes whole numbers, unless other values are told."""
    return field(default=default, metadata={DECLARED: Decision(decides, values, logged, also or {})})


def beyond_one(label: str) -> Callable[[int], str]:
    """Logs a number of parts where there are several."""
    return lambda parts: f"{label} : {parts}" if parts > 1 else ""
