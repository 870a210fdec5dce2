"""The command line: `moaic COMMAND ...`.

`arguments` declares the commands, `ir_commands` runs those on IR text, `model_commands` those on scripts and models;
`render` turns results into lines. Torch is loaded only by a command that computes with tensors.

Exit codes: 0, `MISTAKE` for a user's mistake, which is printed to standard error, `WRONG` for a result that is wrong.
Any other failure is a bug of moaic and crashes with its trace.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from moaic.cli.arguments import parser, split_script_arguments
from moaic.cli.exit_codes import MISTAKE, WRONG
from moaic.ir.errors import Diagnostic

__all__ = ["MISTAKE", "WRONG", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    own, script_arguments = split_script_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        chosen = parser().parse_args(own, argparse.Namespace(script_arguments=script_arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else MISTAKE
    try:
        code: int = chosen.command(chosen)
        sys.stdout.flush()
    except Diagnostic as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, and would print a trace.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
