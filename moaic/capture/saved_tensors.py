"""What a forward was given or kept and its backward reads: as in PyTorch, nobody may write it in between."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class _Version(NamedTuple):
    tensor: Callable[[], Tensor | None]
    version: int
    name: str


def _watched(tensor: Tensor) -> Callable[[], Tensor | None]:
    """A parameter, unless it is gone; of all else an alias, whose writes are counted when the view given is gone."""
    if tensor.is_leaf and tensor.requires_grad:
        return weakref.ref(tensor)
    alias = tensor.detach()
    return lambda: alias


class Saved:
    """What a backward will read of `values`, as it was in the forward: those at the positions in `names`."""

    def __init__(self, names: Mapping[int, str], values: Sequence[Any]) -> None:
        read = [(values[at], name) for at, name in names.items()]
        self._versions = [
            _Version(_watched(each), each._version, name)
            for each, name in read
            if isinstance(each, Tensor) and not each.is_inference()
        ]

    def check(self) -> None:
        """Raise as PyTorch does if one of them has been written since."""
        for each in self._versions:
            tensor = each.tensor()
            if tensor is not None and tensor._version > each.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{each.name or 'an input'} of shape {list(tensor.shape)} is at version {tensor._version}; "
                    f"expected version {each.version} instead"
                )
