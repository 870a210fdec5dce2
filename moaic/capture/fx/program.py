"""A captured program whose sizes are still symbols, instantiated as a function of the IR once per concrete sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import SymInt, Tensor

from moaic.capture.fx.assemble import assembled
from moaic.capture.fx.captured import Captured
from moaic.capture.fx.reader import GraphReader
from moaic.capture.fx.traced_graph import TracedGraph


class FxProgram:
    """A traced graph and the functions that it gives for concrete sizes.

    `sizes(args)` reads the value of each symbol off the arguments of a call; without symbols the sizes are ().
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self._bindings = _bindings(traced.examples())
        self._instances: dict[tuple[int, ...], Captured] = {}

    @property
    def is_training(self) -> bool:
        return len(self.traced.returned) > self.traced.forward_outputs

    @property
    def symbols(self) -> int:
        """Number of sizes that are symbols."""
        return len(self._bindings)

    def sizes(self, args: Sequence[Any]) -> tuple[int, ...]:
        """The value of each symbol in a call of the forward with `args`."""
        return tuple(_value(binding, args) for binding in self._bindings.values())

    def instantiate(self, sizes: tuple[int, ...] = ()) -> Captured:
        """The program for concrete sizes, as `sizes(args)` gives them; built once for each.

        Raises Diagnostic for an op or a size that the IR cannot express.
        """
        if sizes not in self._instances:
            symbols = dict(zip(self._bindings, sizes, strict=True))
            self._instances[sizes] = assembled(GraphReader(self.traced, symbols))
        return self._instances[sizes]


Binding = tuple[int, int | None]
"""Where a symbol is read: the position of an argument, and its dim if the argument is a tensor."""


def _bindings(examples: Sequence[Any]) -> dict[Any, Binding]:
    bindings: dict[Any, Binding] = {}
    for position, value in enumerate(examples):
        if isinstance(value, SymInt):
            _bind(bindings, value, (position, None))
        elif isinstance(value, Tensor):
            for dim, size in enumerate(value.shape):
                _bind(bindings, size, (position, dim))
    return bindings


def _bind(bindings: dict[Any, Binding], size: Any, binding: Binding) -> None:
    if isinstance(size, SymInt) and size.node.expr.is_Symbol:
        bindings.setdefault(size.node.expr, binding)


def _value(binding: Binding, args: Sequence[Any]) -> int:
    position, dim = binding
    argument = args[position]
    return int(argument) if dim is None else int(argument.shape[dim])
