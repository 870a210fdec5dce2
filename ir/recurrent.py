"""What the ops of recurrent layers have in common wherever they are made, planned and run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final

MODES: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")
"""PyTorch's names of the layers."""

_SAVED: Final[Mapping[str, float]] = {"lstm": 4.2, "gru": 2.4}
_SAVED_BY_PLAIN: Final = 1.1
"""Values for each gate of each row and time step that PyTorch's autograd saves of a layer, by mode: measured on a CPU,
50 time steps of 16 rows."""


def flops(x: Sequence[int], params: Iterable[Sequence[int]]) -> int:
    """Operations of the layers forward, from the shapes of input and parameters.

    Each row of each time step meets every matrix.
    """
    return 2 * prod(x[:-1]) * sum(prod(param) for param in params if len(param) == 2)


def products_in_backward(*, is_recorded: bool) -> int:
    """By how much the operations of backward exceed `flops`: layers without a record are run again."""
    return 2 if is_recorded else 3


def values_saved(mode: str, params: Iterable[Sequence[int]]) -> int:
    """How many values autograd saves of the layers for each row and time step, from the shapes of the parameters."""
    # Of each layer a matrix for its input and one for its state.
    gates = sum(param[0] for param in params if len(param) == 2) // 2
    return round(_SAVED.get(mode, _SAVED_BY_PLAIN) * gates)
