"""An excepthook that shows the user's lines of an error.

After a user's mistake it prints the user's line and the message, without a trace; for any other error the trace without
moaic's frames but the last. MOAI_TRACEBACK=full prints everything.
"""

from __future__ import annotations

import sys
import traceback
from functools import cache
from types import TracebackType
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.controller.errors import OutOfMemory
from moaic.runtime.controller.source_lines import raised_at
from moaic.runtime.host.env_flags import FULL, TRACEBACK_VARIABLE
from moaic.support.traces import are_full, is_ours

USER_ERRORS: Final = (Diagnostic, OutOfMemory)
"""Errors whose message tells the user all that is useful."""


@cache
def install() -> None:
    """Installs the hook; errors without a frame of moaic go to the hook that was installed before."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # Dynamo wraps the error of a backend in an error of its own.
        told = getattr(error, "inner_exception", error)
        if are_full():
            previous(kind, error, trace)
        elif isinstance(told, USER_ERRORS):
            line = raised_at(trace)
            sys.stderr.write(f"{told}\n" if line is None else f"{line}: {told}\n")
        elif fold(shown := traceback.TracebackException.from_exception(error)):
            # The error stays the last line, where people and programs look for it.
            sys.stderr.write(f"(frames of moaic are left out; {TRACEBACK_VARIABLE}={FULL} shows them)\n")
            sys.stderr.write("".join(shown.format()))
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def fold(shown: traceback.TracebackException) -> bool:
    """Leaves out moaic's frames of an error and its causes, but the last of each; returns whether it has any.

    `traces.shorten` has mostly left them out before; errors of the compiler and of Dynamo come here as they are.
    """
    has_ours = False
    error: traceback.TracebackException | None = shown
    while error is not None:
        ours = [frame for frame in error.stack if is_ours(frame.filename)]
        error.stack = traceback.StackSummary.from_list(frame for frame in error.stack if frame not in ours[:-1])
        has_ours |= bool(ours)
        error = error.__cause__ or error.__context__
    return has_ours
