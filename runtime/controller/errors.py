"""Errors of the workers as the user sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch


class WorkerError(RuntimeError):
    """A worker raised or ended. The message names the worker, its command, and the line of the user's program."""


class EarlierFailure(Exception):
    """An op of the user failed before something that handles failures of its own; `error` is to be raised instead."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class OutOfMemory(WorkerError):
    """A worker ran out of memory. The message gives the bytes requested and free, and plans that need less."""


_linalg: Final[Any] = torch.linalg

OP_ERRORS: Final[Mapping[str, type[Exception]]] = {
    error.__name__: error
    for error in (
        AssertionError,
        IndexError,
        NotImplementedError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
        ZeroDivisionError,
        _linalg.LinAlgError,
    )
}
"""Exceptions of ops on invalid operands, by name: the user gets the same class with PyTorch's message."""


class LateWarning(UserWarning):
    """An op failed and the program never read a result that depends on it."""
