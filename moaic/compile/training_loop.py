"""The number of steps that the training loop of a library is going to run, read from the loop that called the model."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final


def planned_steps() -> int | None:
    """The optimizer steps of the innermost training loop among the callers; None without one that knows."""
    for frame in _callers():
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library in _READERS and (steps := _READERS[library](frame.f_locals.get("self"))):
            return steps
    return None


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_transformers(loop: Any) -> int | None:
    """`Trainer.state.max_steps`, which is set before the first step, and zero for an evaluation alone."""
    return _number(getattr(getattr(loop, "state", None), "max_steps", None))


def _of_lightning(loop: Any) -> int | None:
    """`Trainer.estimated_stepping_batches`, infinite for a training without an end."""
    trainer = getattr(loop, "trainer", None)
    if not getattr(trainer, "training", False):
        return None
    # The property computes, and raises for schedules that it cannot count.
    with contextlib.suppress(Exception):
        return _number(getattr(trainer, "estimated_stepping_batches", None))
    return None


def _number(value: object) -> int | None:
    return int(value) if isinstance(value, int | float) and 0 < value < sys.maxsize else None


_READERS: Final[Mapping[str, Callable[[Any], int | None]]] = {
    "transformers": _of_transformers,
    "trl": _of_transformers,
    "lightning": _of_lightning,
    "pytorch_lightning": _of_lightning,
}
