"""How a program ends that a person's mistake has stopped: with their line and the message, without our insides."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.controller.errors import OutOfMemory
from moaic.runtime.controller.source_lines import raised_at

FOR_PEOPLE: Final = (Diagnostic, OutOfMemory)
"""Errors whose message says all that a person can use."""


@cache
def install() -> None:
    """Has errors for people end a program with their message. Other errors stay with whoever handled them so far."""
    others = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Dynamo puts what a backend raises inside an error of its own.
        told = getattr(error, "inner_exception", error)
        if not isinstance(told, FOR_PEOPLE):
            others(kind, error, trace)
            return
        line = raised_at(trace)
        sys.stderr.write(f"{told}\n" if line is None else f"{line}: {told}\n")

    sys.excepthook = hook
