"""Determinants, which keep LU factors for their backward, as ops whose results do not depend on strides.

Values of the IR have no strides, from which PyTorch derives whether the matrix or its transpose was factored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moaic.device.determinants import transpose_is_factored

aten: Any = torch.ops.aten


def _factored(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The factors that PyTorch's backward expects, and their pivots."""
    factors, pivots, _ = aten.linalg_lu_factor_ex(matrix.mT if transpose_is_factored(matrix) else matrix)
    return factors, pivots


def _sign(pivots: Tensor) -> Tensor:
    """The determinant of a permutation: pivots that are not their own place are exchanges."""
    places = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - (pivots != places).sum(-1) % 2 * 2


def _det(matrix: Tensor) -> tuple[Tensor, ...]:
    factors, pivots = _factored(matrix)
    return _sign(pivots) * factors.diagonal(0, -2, -1).prod(-1), factors, pivots


def _slogdet(matrix: Tensor) -> tuple[Tensor, ...]:
    factors, pivots = _factored(matrix)
    diagonal = factors.diagonal(0, -2, -1)
    return _sign(pivots) * diagonal.sgn().prod(-1), diagonal.abs().log().sum(-1), factors, pivots


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
}
