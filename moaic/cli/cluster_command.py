"""`moaic cluster check`: looks at the hosts of `cluster.toml` before a program needs them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from moaic.cli.exit_codes import WRONG


def check(chosen: argparse.Namespace) -> int:
    """Prints what was found on all hosts. Returns WRONG where a program could not use one of them."""
    from moaic.tools.cluster_report import checked, requested, to_data, to_text

    with _orderly_end():
        report = checked(requested(os.environ, chosen.folder), _say)
    print(json.dumps(to_data(report), indent=1) if chosen.json else to_text(report))
    return WRONG if report.problems else 0


def _say(text: str) -> None:
    print(f"moaic cluster check: {text}", file=sys.stderr, flush=True)


@contextmanager
def _orderly_end() -> Generator[None]:
    """Let SIGTERM end the body as an exception does: it lets hosts go and removes its file from the folder."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    # Once: another one would end the clean-up.
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)
