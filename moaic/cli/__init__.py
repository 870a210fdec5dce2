"""The command line: `moaic COMMAND ...`.

`arguments` declares the commands, `ir_commands` runs those on IR text, `model_commands` those on scripts and models;
`render` turns results into lines. Torch is loaded only by a command that computes with tensors.

Exit codes are those of `tools/command.py`, and `WRONG` for a result that is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from moaic.cli.arguments import parser, split_script_arguments
from moaic.cli.exit_codes import WRONG
from moaic.tools.command import MISTAKE, answered

__all__ = ["MISTAKE", "WRONG", "main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    own, script_arguments = split_script_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        chosen = parser().parse_args(own, argparse.Namespace(script_arguments=script_arguments))
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else MISTAKE
    return answered(lambda: chosen.command(chosen))
