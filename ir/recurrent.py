"""What the ops of recurrent layers have in common wherever they are made, planned and run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Final

MODES: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""PyTorch's names of the layers."""

RUNS_IN_BACKWARD: Final = 3
"""The layers are run again, and each of their products has two in backward."""


def flops(x: Sequence[int], params: Iterable[Sequence[int]]) -> int:
    """Operations of the layers, from the shapes of input and parameters: each row of each time step meets every matrix.

    In backward they are RUNS_IN_BACKWARD times as many.
    """
    return 2 * prod(x[:-1]) * sum(prod(param) for param in params if len(param) == 2)
