"""The tensors that a forward was given and its backward reads: as in PyTorch, nobody may write them in between."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """A tensor that a backward will read, as it was in the forward."""

    tensor: weakref.ref[Tensor]
    version: int
    name: str


def saved(names: Mapping[int, str], arguments: Sequence[Any]) -> list[Saved]:
    """Of the arguments with these names, by position, those that count how often they are written."""
    found = [(arguments[at], name) for at, name in names.items()]
    return [
        Saved(weakref.ref(each), each._version, name)
        for each, name in found
        if isinstance(each, Tensor) and not each.is_inference()
    ]


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
