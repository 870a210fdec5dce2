"""Captured steps with input values, on which plans are proved without workers."""

from __future__ import annotations

from functools import cache

import torch

from moaic.capture.trace_only import take_call
from moaic.check.proof import CapturedStep, step_of
from tests.exact.example import Example


@cache
def captured_step(example: Example) -> CapturedStep:
    """The step of a model on its batch, with arbitrary values for the tangents of everything that it returns.

    Captured once for all files: it takes longer than most of what is proved of it.
    """
    torch.compiler.reset()
    return step_of(take_call(example.model(), example.batch()))
