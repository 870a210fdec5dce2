"""Exit codes of the tools: 2 after a user's mistake, 130 after an interrupt, both without a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable

from moaic.ir.errors import Diagnostic

MISTAKE = 2
INTERRUPTED = 130


def answered(work: Callable[[], int]) -> int:
    """Runs a command and returns its exit code."""
    try:
        code = work()
        sys.stdout.flush()
    except Diagnostic as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    return code
