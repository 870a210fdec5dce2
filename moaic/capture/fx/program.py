"""A traced graph as functions of the IR: as few as can serve all sizes of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from torch import SymInt, Tensor

from moaic.capture.fx.assemble import assembled
from moaic.capture.fx.captured import Captured, Instance
from moaic.capture.fx.open_sizes import equal_sizes
from moaic.capture.fx.reader import GraphReader
from moaic.capture.fx.traced_graph import TracedGraph
from moaic.ir.graph import Module
from moaic.ir.ops import rule_of
from moaic.ir.sizes import Size, pinned, symbol
from moaic.ir.symbols import Symbols
from moaic.ir.verify import check_made

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
        """A program with open sizes; one for these sizes alone if sizes are equal in ways that no polynomial says."""
        captured = None if self._is_given_up(sizes) else self._read_open(sizes)
        self._programs.append(captured or self._read_closed(sizes))
        return self._programs[-1]

    def _is_given_up(self, sizes: tuple[int, ...]) -> bool:
        usual = (tuple(each.symbols.example.values()) for each in self._programs if each.symbols.is_given_up)
        return sizes in usual

    def _read_open(self, sizes: tuple[int, ...]) -> Captured | None:
        symbols = Symbols()
        named = {each: symbol(symbols, f"s{index}", sizes[index]) for index, each in enumerate(self._bindings)}
        for one, other in equal_sizes(self.traced.examples(), named):
            symbols.identify(one, other)
        try:
            captured = assembled(GraphReader(self.traced, named), symbols)
            if any(isinstance(size, Size) for size in named.values()):
                _check_open(captured)
        except (AssertionError, RuntimeError, ValueError):
            if not named:
                raise
            return None
        return captured

    def _read_closed(self, sizes: tuple[int, ...]) -> Captured:
        """The program for these sizes alone."""
        symbols = Symbols()
        named = {each: pinned(symbol(symbols, f"s{index}", sizes[index])) for index, each in enumerate(self._bindings)}
        return assembled(GraphReader(self.traced, named), symbols)


def _check_open(captured: Captured) -> None:
    """Raises an error unless types and rules of all ops fit whatever the sizes are."""
    check_made(Module((captured.function,)), "capture")
    for op in captured.function.ops:
        rule_of(op)


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
