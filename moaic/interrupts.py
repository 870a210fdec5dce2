"""Ctrl-C where an exception must not begin: in the middle of a message, or of C++ code that allows none."""

from __future__ import annotations

# Its wrapper, the module `signal`, converts handlers to enums, which takes 17 us for a block instead of 1.7.
import _signal  # pyright: ignore[reportMissingImports]
import ctypes
import sys
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Final

signals: Any = _signal

_PYTHON: Final = ctypes.PyDLL(None)

DEPTH: Final = 256
"""Innermost frames of C that are looked at: those of an op are among the first hundred."""

GUARD_CALLS: Final = 4
"""Innermost frames of Python that are looked at: guards in Python call little."""

GENERATED_GUARD: Final = ("<string>", "guard")
"""File and name of guards that Dynamo writes."""


@contextmanager
def uninterrupted(*, once: bool = False) -> Generator[None]:
    """Defer Python's handler of SIGINT, so that it does not interrupt the body; with `once` a second signal does.

    From then on `interrupt` takes the place of Python's own handler, also of one that a notebook sets for each cell.
    """
    handler: Any = signals.getsignal(signals.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    if handler is signals.default_int_handler:
        handler = interrupt
    caught: list[tuple[int, FrameType | None]] = []

    def defer(number: int, at: FrameType | None) -> None:
        caught.append((number, at))
        if once and len(caught) > 1:
            handler(number, at)

    signals.signal(signals.SIGINT, defer)
    try:
        yield
    finally:
        # The body may have set another one, as hooks of autograd do.
        if signals.getsignal(signals.SIGINT) is defer:
            signals.signal(signals.SIGINT, handler)
        if caught:
            handler(*caught[-1])


def interrupt(number: int, at: FrameType | None) -> None:
    """Raise KeyboardInterrupt as Python's own handler does, but not out of an op of PyTorch, or a guard of Dynamo.

    Python runs handlers wherever its API looks for signals. Under an op that may be where PyTorch asks a device written
    in Python for its type, in functions in which an exception ends the process; and Dynamo drops an exception of a
    guard. There the exception waits for the next call or return of Python elsewhere.
    """
    if sys.getprofile() is not None or _waits(at) or not (_is_in_guard(at) or _is_in_op()):
        signals.default_int_handler(number, at)  # raises
    here = sys._getframe()  # pyright: ignore[reportPrivateUsage]

    def raise_elsewhere(frame: FrameType, event: str, argument: object) -> None:
        if frame is not here and not _is_in_guard(frame):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(raise_elsewhere)


def _waits(frame: FrameType | None) -> bool:
    """Whether a frame waits for workers, under an op: a wait goes on after a handler that raises nothing."""
    return frame is not None and frame.f_code.co_filename.endswith("/runtime/protocol/frames.py")


def _is_in_guard(frame: FrameType | None) -> bool:
    """Whether a frame is that of a guard, or of what it calls."""
    for _ in range(GUARD_CALLS):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_filename.endswith("/torch/_dynamo/guards.py") or (code.co_filename, code.co_name) == GENERATED_GUARD:
            return True
        frame = frame.f_back
    return False


def _is_in_op() -> bool:
    """Whether a frame of C is code of PyTorch's ops; False where the C library cannot tell."""
    backtrace: Any = getattr(_PYTHON, "backtrace", None)
    if backtrace is None:
        return False
    frames = (ctypes.c_void_p * DEPTH)()
    count = backtrace(frames, DEPTH)
    return any(low <= (frame or 0) < high for frame in frames[:count] for low, high in _code_of_ops())


@cache
def _code_of_ops() -> Sequence[tuple[int, int]]:
    """The ranges of memory with the machine code of PyTorch's ops."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text(encoding="utf-8", errors="replace").splitlines() if maps.exists() else []
    ranges = [line.split(maxsplit=1)[0].split("-") for line in lines if "libtorch_cpu" in line and "r-xp" in line]
    return [(int(low, 16), int(high, 16)) for low, high in ranges]
