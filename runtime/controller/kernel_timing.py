"""Times of single kernels: a function of one op, run uncompiled by all workers at once."""

from __future__ import annotations

from typing import Final

from moaic.ir.layout import Mesh
from moaic.ir.parser import parse
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.calibrate import AXIS, repeated, timed, warm_up
from moaic.runtime.controller.errors import OP_ERRORS, EarlierFailure, WorkerError

FAILURES: Final = (WorkerError, *OP_ERRORS.values())
"""What commands fail with."""

LONG: Final = 2e-3
"""Seconds that the calls of one kernel take together at least, so that the clock shows them."""

MOST_REPEATS: Final = 20

MORE: Final = 2
"""Rounds after a surprise."""

STEADY: Final = 5e-3
"""Seconds of a kernel from which on one measured round is enough, after the one that warms up."""

SURPRISING: Final = 1.3
"""Measured seconds, relative to those expected, that something else on the machine may have caused."""


def settle(accelerator: Accelerator) -> None:
    """Waits for all earlier commands. Raises EarlierFailure where one has failed."""
    try:
        accelerator.synchronize()
    except FAILURES as error:
        raise EarlierFailure(error) from error


def seconds_to_time(accelerator: Accelerator, expected: float) -> float:
    """Seconds that it takes to time a kernel that is expected to take so long, without surprise."""
    return (warm_up(accelerator) + _rounds(expected)) * _repeats(expected) * expected


def kernel_seconds(accelerator: Accelerator, text: str, expected: float) -> float:
    """Seconds of the function `text` on the slowest worker, in the best round. Raises WorkerError where it fails."""
    (function,) = parse(text).functions
    repeats = _repeats(expected)
    program = repeated(function, Mesh(((AXIS, accelerator.flavor),)), repeats)

    def measured(rounds: int) -> float:
        (seconds,) = timed(accelerator, [program], rounds)
        return seconds / repeats

    seconds = measured(_rounds(expected))
    if seconds > SURPRISING * expected:
        seconds = min(seconds, measured(MORE))
    accelerator.synchronize()
    return seconds


def _repeats(expected: float) -> int:
    return max(1, min(MOST_REPEATS, round(LONG / max(expected, 1e-9))))


def _rounds(expected: float) -> int:
    """Measured rounds."""
    return 1 if expected >= STEADY else 2
