"""Kernels of batch norm, whose ops differ in the statistics that they read, write and save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from moaic.device.generic_kernels import meta_of, mutating
from moaic.device.handles import geometry, new_tensor, view_of
from moaic.runtime.controller import session
from moaic.runtime.protocol.aten_schema import signature_of

aten: Final[Any] = torch.ops.aten

_training: Final = mutating(signature_of(aten._native_batch_norm_legit.default))


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`native_batch_norm`, whose schema does not mark the running statistics as written; those of the ops below do."""
    if running_mean is None or running_var is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, training, momentum, eps)
    return functional(x, weight, bias, running_mean, running_var, training, momentum, eps)


def functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_native_batch_norm_legit`, whose saved statistics are empty in evaluation."""
    if not training:
        return evaluating(x, weight, bias, running_mean, running_var, eps)
    return _training(x, weight, bias, running_mean, running_var, training, momentum, eps)


def evaluating(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with given statistics; like on the CPU, the saved statistics are empty."""
    out_geometry = geometry(x.dtype, x.shape, torch.empty_like(meta_of(x)).stride())
    accelerator = session.accelerator()
    outputs = [new_tensor(out_geometry), *(new_tensor(geometry(x.dtype, (0,), (1,))) for _ in range(2))]
    operands = tuple(None if t is None else view_of(t) for t in (x, weight, bias, running_mean, running_var))
    accelerator.launch(
        "aten._native_batch_norm_legit_no_training",
        (*operands, 0.0, eps),
        {},
        [view_of(output).buffer for output in outputs],
    )
    return outputs[0], outputs[1], outputs[2]


def inferring(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_native_batch_norm_legit_no_training`, which does not use its momentum."""
    return evaluating(x, weight, bias, running_mean, running_var, eps)


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::native_batch_norm": batch_norm,
    "aten::_native_batch_norm_legit": functional,
    "aten::_native_batch_norm_legit_no_training": inferring,
}
"""By torch's name of the op."""
