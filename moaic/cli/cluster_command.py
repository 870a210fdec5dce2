"""`moaic cluster check`: looks at the hosts of `cluster.toml` before a program needs them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Final, NoReturn

from moaic.cli.exit_codes import WRONG

AGAIN_SECONDS: Final = 0.05
"""From a dropped end to the next."""


def check(chosen: argparse.Namespace) -> int:
    """Prints what was found on all hosts. Returns WRONG where a program could not use one of them."""
    from moaic.tools.cluster_report import checked, requested, to_data, to_text

    with orderly_end():
        report = checked(requested(os.environ, chosen.folder), _say)
    print(json.dumps(to_data(report), indent=1) if chosen.json else to_text(report))
    return WRONG if report.problems else 0


def _say(text: str) -> None:
    print(f"moaic cluster check: {text}", file=sys.stderr, flush=True)


@contextmanager
def orderly_end() -> Generator[None]:
    """Let SIGTERM end the body as an exception does: it lets hosts go and removes its file from the folder."""
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGALRM)}
    report = sys.unraisablehook
    sys.unraisablehook = partial(_end_later, report)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = report
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    # Once: another one would end the clean-up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def _end_later(report: Callable[[sys.UnraisableHookArgs], None], dropped: sys.UnraisableHookArgs) -> None:
    """Python drops what is raised amid a callback, as by a lock of imports: the end is raised again soon after it."""
    if isinstance(dropped.exc_value, SystemExit):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
    else:
        report(dropped)
