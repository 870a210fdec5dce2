"""An excepthook that ends a program after a user's mistake with the user's line and the message, without a trace."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.controller.errors import OutOfMemory
from moaic.runtime.controller.source_lines import raised_at

USER_ERRORS: Final = (Diagnostic, OutOfMemory)
"""Errors whose message tells the user all that is useful."""


@cache
def install() -> None:
    """Installs the hook; other errors go to the hook that was installed before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Dynamo wraps the error of a backend in an error of its own.
        told = getattr(error, "inner_exception", error)
        if not isinstance(told, USER_ERRORS):
            previous(kind, error, trace)
            return
        line = raised_at(trace)
        sys.stderr.write(f"{told}\n" if line is None else f"{line}: {told}\n")

    sys.excepthook = hook
