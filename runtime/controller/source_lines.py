"""Attribution of commands and errors to lines of the user's program."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NamedTuple

import torch

NOWHERE: Final = -1
"""The number that stands for no line."""


class SourceLine(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class SourceLines:
    """Numbers of the user's lines, which commands carry."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._lines: list[SourceLine] = []

    def here(self) -> int:
        """The number of the calling thread's current line in the user's program, as of `backward()` in a backward."""
        frame = _user_frame(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return NOWHERE
        # Every command calls this, so a named tuple is made only for a new line.
        place = frame.f_code.co_filename, frame.f_lineno
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._lines)
            self._lines.append(SourceLine(*place))
        return number

    def line(self, number: int) -> SourceLine | None:
        return self._lines[number] if 0 <= number < len(self._lines) else None


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's own files; else of any file outside of torch and moaic."""
    fallback = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "user":
            return frame
        if kind == "library" and fallback is None:
            fallback = frame
        frame = frame.f_back
    return fallback


def raised_at(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of the user's own files in the traceback of an error."""
    innermost: SourceLine | None = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        innermost = SourceLine(file, trace.tb_lineno) if _kind(file) == "user" else innermost
        trace = trace.tb_next
    return innermost


@cache
def _kind(file: str) -> str:
    """The kind of a file: user, library (installed packages, standard library) or inside (torch, moaic, generated)."""
    if file.startswith("<"):
        return "user" if file.startswith(("<stdin", "<string", "<ipython")) else "inside"
    path = Path(file).resolve()
    if any(path.is_relative_to(folder) for folder in _inside()):
        return "inside"
    return "library" if any(path.is_relative_to(folder) for folder in _libraries()) else "user"


@cache
def _inside() -> tuple[Path, ...]:
    runtime = Path(__file__).resolve().parents[1]
    package = Path(__file__).absolute().parents[2]
    packages = [package, *(entry.resolve() for entry in package.iterdir() if entry.is_symlink())]
    return (Path(torch.__file__).resolve().parent, runtime, *(folder.resolve() for folder in packages))


@cache
def _libraries() -> tuple[Path, ...]:
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})
