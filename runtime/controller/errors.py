"""What went wrong on the workers, as the person sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch


class WorkerError(RuntimeError):
    """A worker raised or ended. It names the worker, what it did, and the line of the person's program."""


class OutOfMemory(WorkerError):
    """A worker got no more memory. It says what was asked for, what was free, and what would do with less."""


_linalg: Final[Any] = torch.linalg

OF_OPS: Final[Mapping[str, type[Exception]]] = {
    kind.__name__: kind
    for kind in (
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
"""What ops raise where their operands are not as they must be; it is raised as it is, with PyTorch's own words."""


class LateWarning(UserWarning):
    """An op failed whose result nobody has read."""
