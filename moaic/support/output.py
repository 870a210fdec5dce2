"""Files that the user asked a command to write."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.text.files import write_whole


def write_output(path: Path, text: str) -> None:
    """Writes a file, and the folder that it lies in. Raises Diagnostic."""
    with writing(path):
        write_whole(path, text)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Raises Diagnostic where what is written to a file or folder within cannot be."""
    try:
        yield
    except OSError as error:
        raise Diagnostic(f"cannot write {path}: {error.strerror or error}") from None
