"""Products of a mixture of experts, `moai.grouped_mm` and `moai.grouped_outer`, as torch calls.

With a leading dim the matrices fall into as many blocks, and a row is zero in all blocks but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moaic.ir.graph import Op
from moaic.runtime.codegen import gpu_grouped_mm
from moaic.runtime.codegen import grouped_mm as ops


def grouped_mm(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """[s, f] or [blocks, s, f], from rows [s, d] or [1 or blocks, s, d], matrices [e, f, d] and ids [s]."""
    x, weight, ids = operands
    shape = op.results[0].type.shape
    if len(shape) == 2:
        return _product(x, weight, ids, device)
    blocks, size = shape[0], weight.shape[0] // shape[0]
    products = [_product(_block(x, i), weight.narrow(0, i * size, size), ids - i * size, device) for i in range(blocks)]
    return torch.stack(products)


def grouped_outer(op: Op, operands: Sequence[Any], device: torch.device) -> Tensor:
    """The gradient [count, f, d] of the matrices."""
    grad, x, ids = operands
    count: Any = op.attrs["count"]
    if grad.dim() == 2:
        return _outer(grad, x, ids, count, device)
    blocks = max(len(grad), len(x))
    size = count // blocks
    gradients = [_outer(_block(grad, i), _block(x, i), ids - i * size, size, device) for i in range(blocks)]
    return torch.cat(gradients)


def _product(x: Tensor, weight: Tensor, ids: Tensor, device: torch.device) -> Tensor:
    way = gpu_grouped_mm if gpu_grouped_mm.takes(device, x, weight, weight.mT) else ops
    return way.grouped_mm(x, weight, ids)


def _outer(grad: Tensor, x: Tensor, ids: Tensor, count: int, device: torch.device) -> Tensor:
    way = gpu_grouped_mm if gpu_grouped_mm.takes(device, grad, x) else ops
    return way.grouped_outer(grad, x, ids, count)


def _block(x: Tensor, index: int) -> Tensor:
    """The block of this index, or the only one; indexing would make the device the current one."""
    return x.select(0, min(index, len(x) - 1))
