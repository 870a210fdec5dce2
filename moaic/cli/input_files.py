"""Input of the commands: IR files, and text in general."""

from __future__ import annotations

import sys
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.parser import Parsed
from moaic.ir.specialize import in_example
from moaic.ir.verify import load_with_places
from moaic.passes.schedules import schedule_in


def read_module(path: str) -> Module:
    """The verified module in a file, or in standard input for `-`; it has a function, and a schedule that can be run.

    Raises Diagnostic.
    """
    return read_with_places(path).module


def read_with_places(path: str) -> Parsed:
    """As `read_module`, with the place of each op."""
    name = "<stdin>" if path == "-" else path
    parsed = load_with_places(read_text(path), name)
    if not parsed.module.functions:
        raise Diagnostic(f"{name} has no function", hint="IR text begins with `// moai 1` and has `func` below")
    schedule_in(parsed.module)
    return parsed


def read_closed_module(path: str) -> Module:
    """As `read_module`, at the sizes of the example where sizes are open: for what needs numbers."""
    return in_example(read_module(path))


def read_text(path: str) -> str:
    """The text of a file, or of standard input for `-`. Raises Diagnostic."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise Diagnostic(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise Diagnostic(f"cannot read {path}: it is no text ({error.reason} at byte {error.start})") from None
