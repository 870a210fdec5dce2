"""The multi-label margin loss as ops that have rules: PyTorch's own for graphs counts classes that are no targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "none": lambda losses: losses,
}


def multilabel_margin_loss(
    x: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """`x` and `target` are `[classes]` or `[rows, classes]`; a row's targets end before its first negative class."""
    if size_average is not None or reduce is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if x.dim() not in (1, 2) or x.shape != target.shape or not x.shape[-1] or reduction not in REDUCTIONS:
        return functional.multilabel_margin_loss(x, target, reduction=reduction)
    given = (target < 0).cumsum(-1) == 0
    classes = target.where(given, 0)
    is_target = x.new_zeros(x.shape).scatter_add(-1, classes, given.to(x.dtype)) > 0
    margins = (1 - x.gather(-1, classes)[..., :, None] + x[..., None, :]).clamp_min(0)
    counted = margins.where(given[..., :, None] & ~is_target[..., None, :], 0)
    return REDUCTIONS[reduction](counted.sum((-2, -1)) / x.shape[-1])
