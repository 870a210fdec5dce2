"""A captured program as compiling and running it need it, and the same at the sizes of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from moaic.capture.output_aliases import MemoryOrder, OutputAlias, OutputView
from moaic.ir.graph import Function
from moaic.ir.specialize import Specializer
from moaic.ir.symbols import Symbols
from moaic.ir.types import TensorType

Slot = int | float | bool | None | OutputView
"""One item of a list that AOTAutograd expects back: a tensor in memory of the call, a plain number, or nothing."""


@dataclass(frozen=True, eq=False)
class Captured:
    """A captured program, and how its parameters and results meet AOTAutograd's lists."""

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
    symbols: Symbols = field(default_factory=Symbols)
    """The symbols of its sizes; for calls whose sizes they do not hold for there is another program."""

    @cached_property
    def is_training(self) -> bool:
        return bool(self.grads)


class Instance:
    """A captured program at the sizes of one call."""

    def __init__(self, captured: Captured, sizes: Sequence[int] = ()) -> None:
        """`sizes` are the numbers of the program's symbols."""
        self.captured = captured
        self.sizes = tuple(sizes)
        self._at = at = Specializer(captured.symbols.numbers(sizes))
        self.results: tuple[TensorType, ...] = tuple(at.type(value.type) for value in captured.function.results)
        """The type of each result of the function."""
        orders = captured.memory_orders
        self.memory_orders = tuple(order and _order(order, at) for order in orders)
        self.outputs, self.grads = (
            tuple(_slot(slot, at) for slot in slots) for slots in (captured.outputs, captured.grads)
        )
        """As those of `captured`, with plain numbers."""

    @cached_property
    def closed(self) -> Captured:
        """The program of these sizes alone."""
        return replace(
            self.captured,
            function=self._at.function(self.captured.function),
            memory_orders=self.memory_orders,
            outputs=self.outputs,
            grads=self.grads,
            symbols=Symbols(),
        )


def _order(order: MemoryOrder, at: Specializer) -> MemoryOrder:
    return MemoryOrder(at.attr(order.shape), at.attr(order.strides), order.order)


def _slot(slot: Slot, at: Specializer) -> Slot:
    if not isinstance(slot, OutputView):
        return at.attr(slot)
    return replace(slot, views=tuple(_view(view, at) for view in slot.views))


def _view(view: OutputAlias, at: Specializer) -> OutputAlias:
    return replace(view, arguments=at.attr(view.arguments), keywords=at.attr(view.keywords))
