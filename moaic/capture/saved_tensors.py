"""Tensors saved for the backward: as in PyTorch, a write to one between forward and backward is an error."""

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
    """A weak reference to a parameter; for other tensors an alias, which counts writes after the tensor is freed."""
    if tensor.is_leaf and tensor.requires_grad:
        return weakref.ref(tensor)
    alias = tensor.detach()
    return lambda: alias


class Saved:
    """The versions that the saved tensors have in the forward: those of `values` at the positions in `names`."""

    def __init__(self, names: Mapping[int, str], values: Sequence[Any]) -> None:
        read = [(values[at], name) for at, name in names.items()]
        self._versions = [
            _Version(_watched(each), each._version, name)
            for each, name in read
            if isinstance(each, Tensor) and not each.is_inference()
        ]

    def check(self) -> None:
        """Raise PyTorch's error if a saved tensor has been written since."""
        for each in self._versions:
            tensor = each.tensor()
            if tensor is not None and tensor._version > each.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{each.name or 'an input'} of shape {list(tensor.shape)} is at version {tensor._version}; "
                    f"expected version {each.version} instead"
                )
