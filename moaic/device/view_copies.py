"""Ops that copy views of a tensor into a list of tensors, each resized to its view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

aten: Final[Any] = torch.ops.aten


def _into(views: Callable[..., Sequence[torch.Tensor]]) -> Callable[..., None]:
    def kernel(*args: Any, out: Sequence[torch.Tensor], **kwargs: Any) -> None:
        for target, piece in zip(out, views(*args, **kwargs), strict=True):
            target.resize_(piece.shape).copy_(piece)

    return kernel


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::split_copy.Tensor_out": _into(aten.split.Tensor),
    "aten::split_with_sizes_copy.out": _into(aten.split_with_sizes.default),
    "aten::unbind_copy.int_out": _into(aten.unbind.int),
}
