"""A captured program for concrete sizes, as compiling and running it need it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from moaic.capture.output_aliases import MemoryOrder, OutputView
from moaic.ir.graph import Function

Slot = int | float | bool | None | OutputView
"""One item of a list that AOTAutograd expects back: a tensor in memory of the call, a plain number, or nothing."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured program for concrete sizes, and how its parameters and results meet AOTAutograd's lists."""

    function: Function
    """Parameters: those of the user's program in AOTAutograd's order, tangents, constants, the random key if any."""
    arguments: tuple[int, ...]
    """For each param, buffer and input, in order: its position in the argument list of the forward."""
    tangents: tuple[int, ...]
    """For each tangent, in order: its position in the backward's list of tangents."""
    constants: tuple[Tensor, ...]
    """The value of each parameter with role constant, in order; on the CPU."""
    updates: tuple[int, ...]
    """For each result with role update, in order (they come first): the argument, counted as in `arguments`, that
    AOTAutograd overwrites with it once the forward has returned."""
    forward_results: int
    """Number of the function's results that the forward gives (outputs and updates); the rest are gradients."""
    on_host: tuple[bool, ...]
    """For each result, gradients too: whether it is a tensor of the host."""
    memory_orders: tuple[MemoryOrder | None, ...]
    """Memory layout of each result of the forward that is not row-major; the function's result has its dims in that
    order."""
    outputs: tuple[Slot, ...]
    """The list that the forward returns to AOTAutograd."""
    grads: tuple[Slot, ...]
    """The list that the backward returns to AOTAutograd: one slot per argument of the forward."""
    has_key: bool
    """Whether the last parameter is the random key."""

    @cached_property
    def is_training(self) -> bool:
        return bool(self.grads)
