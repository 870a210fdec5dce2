"""Dead code elimination: drop ops on which no result of the function depends."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from moaic.ir.backward_slice import backward_slice
from moaic.ir.graph import Function, Module


@dataclass(frozen=True, slots=True)
class DeadCodeElimination:
    name: ClassVar[str] = "dead"
    summary: ClassVar[str] = "drop ops whose results are never read"

    def apply(self, module: Module) -> Module:
        return without_dead_ops(module)


def needed_forward(function: Function) -> set[int]:
    """Positions of the ops of the forward: those that results other than gradients depend on."""
    return backward_slice(function, (function.results[i] for i in function.outputs))


def without_dead_ops(module: Module) -> Module:
    """`module` with only ops that some result depends on, and only functions that are called."""
    functions = [live(function) for function in module.functions]
    called = {op.callee for function in functions for op in function.ops if op.name == "call"}
    return replace(module, functions=(*(f for f in functions[:-1] if f.name in called), functions[-1]))


def live(function: Function) -> Function:
    """`function` with only ops that some result depends on."""
    indices = backward_slice(function, function.results)
    return replace(function, ops=tuple(op for i, op in enumerate(function.ops) if i in indices))
