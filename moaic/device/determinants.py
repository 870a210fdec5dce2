"""Determinants, which keep LU factors for their backward.

PyTorch factors the transpose of a row-major real matrix, and its backward derives from the strides of the matrix which
of the two was factored. A worker runs these ops on row-major matrices, whatever the strides of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from moaic.device.generic_kernels import functional
from moaic.runtime.protocol.aten_schema import signature_of

aten: Final[Any] = torch.ops.aten

_det: Final = functional(signature_of(aten._linalg_det.default))
_slogdet: Final = functional(signature_of(aten._linalg_slogdet.default))


def transpose_is_factored(matrix: Tensor) -> bool:
    """Whether PyTorch's backward takes the factors of `matrix` for those of its transpose."""
    return matrix.is_contiguous() and not matrix.is_complex()


def _of_row_major(kernel: Callable[[Tensor], tuple[Tensor, ...]]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """A kernel for every order of strides, from one that is right for complex and for row-major matrices.

    A matrix and its transpose have one determinant.
    """

    def run(matrix: Tensor) -> tuple[Tensor, ...]:
        is_right = matrix.is_complex() or transpose_is_factored(matrix)
        return kernel(matrix if is_right else matrix.mT.contiguous())

    return run


KERNELS: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::_linalg_det": _of_row_major(_det),
    "aten::_linalg_slogdet": _of_row_major(_slogdet),
}
"""By torch's name of the op."""
