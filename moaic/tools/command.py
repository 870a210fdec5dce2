"""What the tools' command lines have in common: a person's mistake ends with 2, an interrupt with 130, both quietly."""

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
