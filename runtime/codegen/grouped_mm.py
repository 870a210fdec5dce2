"""Grouped matrix products, for mixtures of experts: each row is multiplied by one of a few matrices.

`moai::grouped_mm(x, weight, ids)` multiplies row s of `x` by `weight[ids[s]]` transposed, and gives zero where `ids[s]`
is the index of no matrix; `moai::grouped_outer` is the gradient of the matrices. Rows of one matrix are multiplied
together, so nothing is computed twice and no matrix is copied per row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor


@torch.library.custom_op("moai::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """[s, d], [e, f, d], [s] -> [s, f]."""
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, rows in _groups(ids, weight.shape[0]):
        out[rows] = x[rows] @ weight[expert].t()
    return out


@torch.library.custom_op("moai::grouped_outer", mutates_args=())
def grouped_outer(grad: Tensor, x: Tensor, ids: Tensor, count: int) -> Tensor:
    """[s, f], [s, d], [s] -> [e, f, d]: for each matrix the sum of the products of its rows."""
    out = x.new_zeros(count, grad.shape[1], x.shape[1])
    for expert, rows in _groups(ids, count):
        torch.mm(grad[rows].t(), x[rows], out=out[expert])
    return out


def _groups(ids: Tensor, count: int) -> Iterator[tuple[int, Tensor]]:
    """The rows of each matrix that has any."""
    order = ids.argsort()
    ends = cast("list[int]", torch.searchsorted(ids[order], torch.arange(count + 1, device=ids.device)).tolist())
    for expert in range(count):
        if ends[expert] < ends[expert + 1]:
            yield expert, order[ends[expert] : ends[expert + 1]]


@grouped_mm.register_fake
def _like_rows(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@grouped_outer.register_fake
def _like_matrices(grad: Tensor, x: Tensor, ids: Tensor, count: int) -> Tensor:
    return x.new_empty(count, grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ids = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    grad_x = torch.ops.moai.grouped_mm(grad, weight.transpose(1, 2), ids) if wants_x else None
    grad_weight = torch.ops.moai.grouped_outer(grad, x, ids, weight.shape[0]) if wants_weight else None
    return grad_x, grad_weight, None


grouped_mm.register_autograd(_differentiate, setup_context=_save)
