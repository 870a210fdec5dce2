"""The ops on which values depend."""

from __future__ import annotations

from collections.abc import Iterable

from moaic.ir.graph import Function, Value


def backward_slice(function: Function, targets: Iterable[Value]) -> set[int]:
    """Positions of the ops on which `targets` depend, directly or not."""
    wanted = set(targets)
    found: set[int] = set()
    for index in range(len(function.ops) - 1, -1, -1):
        op = function.ops[index]
        if any(result in wanted for result in op.results):
            found.add(index)
            wanted.update(op.inputs())
    return found
