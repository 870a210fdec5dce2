"""A traced graph as functions of the IR: as few as can serve all sizes of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import SymInt, Tensor

from moaic.capture.fx.assemble import assembled
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.open_sizes import equal_products
from moaic.capture.fx.reader import GraphReader
from moaic.capture.fx.traced_graph import TracedGraph
from moaic.ir.sizes import symbol
from moaic.ir.symbols import Symbols

SIZES_KEPT: Final = 256
"""Sizes of calls of which the instances are kept."""


class FxProgram:
    """A traced graph and the programs that it gives.

    `sizes(args)` reads the number of each symbol off the arguments of a call; without symbols the sizes are ().
    """

    def __init__(self, traced: TracedGraph) -> None:
        self.traced = traced
        self._bindings = _bindings(traced.examples())
        self._programs: list[Captured] = []
        self._instances: dict[tuple[int, ...], tuple[Instance, int]] = {}
        """Per sizes the latest instance, and the strictness of its program's symbols when it was found right."""

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

    def instantiate(self, sizes: tuple[int, ...] = ()) -> Instance:
        """A program for sizes, as `sizes(args)` gives them, and what it is at these.

        Raises Diagnostic for an op or a size that the IR cannot express.
        """
        found = self._instances.get(sizes)
        if found is None or found[0].captured.symbols.strictness != found[1]:
            if len(self._instances) >= SIZES_KEPT:
                self._instances.clear()
            captured = next((each for each in self._programs if each.symbols.hold(sizes)), None) or self._read(sizes)
            found = self._instances[sizes] = (Instance(captured, sizes), captured.symbols.strictness)
        return found[0]

    def _read(self, sizes: tuple[int, ...]) -> Captured:
        symbols = Symbols()
        named = {each: symbol(symbols, f"s{index}", sizes[index]) for index, each in enumerate(self._bindings)}
        for one, other in equal_products(self.traced.examples(), named):
            symbols.identify(one, other)
        self._programs.append(assembled(GraphReader(self.traced, named), symbols))
        return self._programs[-1]


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
