"""What a backward reads of the tensors that its forward was given: as in PyTorch, nobody may write them between."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from moaic.ir.graph import Function, Value
from moaic.ir.ops import Kind, kind_of


def read_by_backward(function: Function) -> frozenset[int]:
    """The parameters that ops of the backward read as they are, or a view of them; what PyTorch would save."""
    sources = {param: index for index, param in enumerate(function.params)}
    backward: set[Value] = {p for p, i in sources.items() if function.param_role(i).kind == "tangent"}
    read: set[int] = set()
    for op in function.ops:
        operands = list(op.inputs())
        if not backward.isdisjoint(operands):
            backward.update(op.results)
            read.update(sources[value] for value in operands if value in sources and value not in backward)
        elif kind_of(op) is Kind.VIEW and operands[0] in sources:
            sources.update(dict.fromkeys(op.results, sources[operands[0]]))
    return frozenset(read)


class Saved(NamedTuple):
    """A tensor that a backward will read, as it was in the forward."""

    tensor: weakref.ref[Tensor]
    version: int
    name: str


def saved(function: Function, positions: Iterable[int], arguments: Sequence[Tensor]) -> list[Saved]:
    """Of the arguments at `positions`, those that count how often they are written."""
    found = ((arguments[at], function.param_role(at).label) for at in positions)
    return [Saved(weakref.ref(each), each._version, name) for each, name in found if not each.is_inference()]


def check(kept: Iterable[Saved]) -> None:
    """Raise as PyTorch does if one of them has been written since; one that nobody holds cannot be."""
    for each in kept:
        tensor = each.tensor()
        if tensor is not None and tensor._version > each.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{each.name or 'an input'} of shape {list(tensor.shape)} is at version {tensor._version}; "
                f"expected version {each.version} instead"
            )
