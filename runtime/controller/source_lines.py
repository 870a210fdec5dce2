"""Which line of the person's program asks for something."""

from __future__ import annotations

import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NamedTuple

import torch

NOWHERE: Final = -1
"""Number of no line at all."""


class SourceLine(NamedTuple):
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class SourceLines:
    """Numbers for the lines that asked for something, so that commands can carry them."""

    def __init__(self) -> None:
        # Fixed while this exists: a forked child, in which another thread may be the main one, makes its own.
        self._main = threading.main_thread().ident
        self._numbers: dict[tuple[str, int], int] = {}
        self._lines: list[SourceLine] = []

    def here(self) -> int:
        """The number of the line that the person's program is at. On autograd's threads: that of its `backward()`."""
        is_main = threading.get_ident() == self._main
        frame = _persons(sys._getframe(1) if is_main else _main_frame())  # pyright: ignore[reportPrivateUsage]
        if frame is None:
            return NOWHERE
        # Every command asks, so a named tuple is made only for a new line.
        place = frame.f_code.co_filename, frame.f_lineno
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._lines)
            self._lines.append(SourceLine(*place))
        return number

    def line(self, number: int) -> SourceLine | None:
        return self._lines[number] if 0 <= number < len(self._lines) else None


def _main_frame() -> FrameType | None:
    """Where the main thread is: a backward kernel runs on another thread while it waits inside `backward()`."""
    identity = threading.main_thread().ident
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    return None if identity is None else frames.get(identity)


def _persons(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the person's own files; of anything but torch and moaic where there is none."""
    fallback = None
    while frame is not None:
        kind = _kind(frame.f_code.co_filename)
        if kind == "person":
            return frame
        if kind == "library" and fallback is None:
            fallback = frame
        frame = frame.f_back
    return fallback


def raised_at(trace: TracebackType | None) -> SourceLine | None:
    """The innermost line of the person's own files on the way to where an error was raised."""
    found: SourceLine | None = None
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        found = SourceLine(file, trace.tb_lineno) if _kind(file) == "person" else found
        trace = trace.tb_next
    return found


@cache
def _kind(file: str) -> str:
    """person, library (installed packages and Python's own), or inside (torch, moaic, generated code)."""
    if file.startswith("<"):
        return "person" if file.startswith(("<stdin", "<string", "<ipython")) else "inside"
    path = Path(file).resolve()
    if any(path.is_relative_to(folder) for folder in _inside()):
        return "inside"
    return "library" if any(path.is_relative_to(folder) for folder in _libraries()) else "person"


@cache
def _inside() -> tuple[Path, ...]:
    runtime = Path(__file__).resolve().parents[1]
    face = Path(__file__).absolute().parents[2]
    packages = [face, *(entry.resolve() for entry in face.iterdir() if entry.is_symlink())]
    return (Path(torch.__file__).resolve().parent, runtime, *(package.resolve() for package in packages))


@cache
def _libraries() -> tuple[Path, ...]:
    return tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")})
