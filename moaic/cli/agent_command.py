"""`moaic agent`: lets programs of another host use the workers of this one."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import PORTS

RETRY_SECONDS = 0.5

MOST_OF_INPUT = 4096


def agent(chosen: argparse.Namespace) -> int:
    """Serves one program, or with --stay one after the other; waits for one that does not listen yet."""
    from moaic.runtime.launch.agent import join

    address, secret = _address(chosen.connect), _secret()
    name = chosen.host or os.uname().nodename
    while True:
        until = None if chosen.stay else time.monotonic() + chosen.wait
        _join_when_there(lambda: join(address, name, secret, _say), until)
        if not chosen.stay:
            return 0


def _join_when_there(join: Callable[[], None], until: float | None) -> None:
    """Join a job; if nobody listens yet, try again until then, or for ever."""
    while True:
        try:
            return join()
        except Diagnostic as error:
            is_early = isinstance(error.__cause__, ConnectionRefusedError)
            if is_early and (until is None or time.monotonic() < until):
                time.sleep(RETRY_SECONDS)
                continue
            if until is not None:
                raise
            _say(str(error))
            time.sleep(RETRY_SECONDS)


def _say(text: str) -> None:
    print(f"moaic agent: {text}", file=sys.stderr, flush=True)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) not in PORTS[1:]:
        raise Diagnostic(f"--connect takes HOST:PORT, not `{text}`")
    return host.strip("[]"), int(port)


def _secret() -> str:
    """MOAI_TOKEN, else the first line of standard input. Never an argument: all users of a host can read those."""
    found = os.environ.pop("MOAI_TOKEN", "") or ("" if sys.stdin.isatty() else sys.stdin.readline(MOST_OF_INPUT))
    if not found.strip():
        raise Diagnostic(
            "an agent needs the secret of the program that it serves",
            hint="set MOAI_TOKEN, or give it by standard input",
        )
    return found.strip()
