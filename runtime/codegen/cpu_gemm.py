"""Matrix products on this host's CPU by the faster of the two libraries that PyTorch brings, MKL and oneDNN.

PyTorch itself multiplies float32 matrices by MKL alone. MKL's kernels for processors other than Intel's are the slower
ones: on a Zen 4 core oneDNN takes 0.82 to 0.9 of their time where the left matrix lies row by row.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import SymInt, Tensor

LEAST_FLOPS: Final = 1 << 25
"""FLOPs from which oneDNN's longer way to its kernel (15 us) does not matter."""

_LIBRARY: Final[Any] = torch.library.Library("moai", "FRAGMENT")


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of two matrices with any strides."""
    if _is_for_onednn(left, right):
        return torch.ops.moai.product.default(left, right)
    return torch.ops.aten.mm.default(left, right)


def _is_for_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN is known to be faster; a transposed left matrix it would have to copy.

    For sizes that are symbols the op itself decides, when it runs.
    """
    is_float = left.dtype == right.dtype == torch.float32 and left.device.type == right.device.type == "cpu"
    return is_float and left.stride(1) == 1 and _mkl_is_slower() and (_is_open(left, right) or _is_large(left, right))


def _is_open(left: Tensor, right: Tensor) -> bool:
    return any(isinstance(size, SymInt) for size in (*left.shape, *right.shape))


def _is_large(left: Tensor, right: Tensor) -> bool:
    return 2 * left.shape[0] * left.shape[1] * right.shape[1] >= LEAST_FLOPS


@cache
def _mkl_is_slower() -> bool:
    """All workers must choose alike: what several of them compute must be equal to the last bit."""
    path = Path("/proc/cpuinfo")
    makers = path.read_text(encoding="utf-8") if path.exists() else ""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and "AuthenticAMD" in makers


def _by_onednn(left: Tensor, right: Tensor) -> Tensor:
    if not _is_large(left, right):
        return torch.ops.aten.mm.default(left, right)
    return torch.ops.mkldnn._linear_pointwise.default(left, right.t(), None, "none", [], "")


def _like_product(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1])


_LIBRARY.define("product(Tensor left, Tensor right) -> Tensor")
_LIBRARY.impl("product", _by_onednn, "CPU")
torch.library.register_fake("moai::product", _like_product, lib=_LIBRARY)
