"""What all commands share: how arguments are read, what a mistake prints, and the exit codes.

0 is success, `MISTAKE` a user's mistake, `INTERRUPTED` an interrupt, both without a trace. Any other exception is a bug
of moaic and crashes with its trace.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.env_flags import FULL, TRACEBACK_VARIABLE
from moaic.runtime.host.version import VERSION

MISTAKE: Final = 2
INTERRUPTED: Final = 130


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are two lines: what is wrong, and where help is."""

    def error(self, message: str) -> NoReturn:
        self.exit(MISTAKE, f"error: {message}\nhint: `{self.prog} --help` describes the command\n")

    def add_version(self) -> None:
        self.add_argument("--version", action="version", version=f"moaic {VERSION}")


def answered(work: Callable[[], int]) -> int:
    """Runs a command and returns its exit code."""
    try:
        code = work()
        sys.stdout.flush()
    except Diagnostic as error:
        if os.environ.get(TRACEBACK_VARIABLE) == FULL:
            traceback.print_exception(error)
        print(error, file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends, and would print a trace.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def positive(text: str) -> int:
    """The type of an argument that counts something: a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number above 0")
    if int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"`{text}` is not below {1 << 31}")
    return int(text)


def natural(text: str) -> int:
    """The type of an argument that is a number or a seed of 64 bits: a whole number, at least 0."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 0 to {(1 << 63) - 1}")
    return int(text)


def new_file(text: str) -> Path:
    """The type of an argument that names a file to write."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is a folder, not a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder `{path.parent}` to write `{path.name}` to")
    return _writable(path if path.exists() else path.parent, text)


def new_folder(text: str) -> Path:
    """The type of an argument that names a folder to write files to, which need not exist."""
    above = next(each for each in (Path(text), *Path(text).absolute().parents) if each.exists())
    if not above.is_dir():
        raise argparse.ArgumentTypeError(f"`{above}` is a file, not a folder")
    return _writable(above, text)


def existing_folder(text: str) -> Path:
    """The type of an argument that names a folder which is there."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder `{text}`")
    return Path(text)


def _writable(existing: Path, text: str) -> Path:
    if not os.access(existing, os.W_OK):
        raise argparse.ArgumentTypeError(f"`{text}` cannot be written: no permission")
    return Path(text)
