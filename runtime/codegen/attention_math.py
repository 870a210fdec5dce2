"""Scaled dot product attention in plain PyTorch, forward and backward: the definition of `moai.sdpa`.

The device composes eager attention of these functions, and workers compile them where no attention kernel takes the
operands. Arithmetic is in float32, or in float64 for operands in float64. A row that attends to no key has the result
zero and the logsumexp -inf.
"""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The element type of the arithmetic."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scores(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The operand of the softmax, [..., M, N], from query[..., M, D] and key[..., N, D].

    `mask` broadcasts to the scores: booleans (True: attend) or numbers to add. With `causal`, row m attends to the keys
    up to the m-th.
    """
    wide = accumulator(query.dtype)
    products = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    if mask is not None:
        products = products.masked_fill(~mask, -inf) if mask.dtype == torch.bool else products + mask
    if causal:
        rows = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
        columns = torch.arange(key.shape[-2], device=query.device)
        products = torch.where(columns <= rows, products, -inf)
    return products


def weights(scored: Tensor, logsumexp: Tensor) -> Tensor:
    """The softmax of scores whose logsumexp is known; zeros, not NaN, in a row that attends to no key."""
    finite = torch.where(logsumexp == -inf, 0.0, logsumexp)
    return torch.exp(scored - finite.unsqueeze(-1))


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The result [..., M, D] and the logsumexp [..., M] of its scores, both in the accumulator's type."""
    scored = scores(query, key, mask, causal, scale)
    logsumexp = torch.logsumexp(scored, -1)
    shares = weights(scored, logsumexp)
    return shares @ value.to(shares.dtype), logsumexp


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value in the accumulator's type, from that of the result."""
    shares = weights(scores(query, key, mask, causal, scale), logsumexp)
    wide = shares.dtype
    grad = grad.to(wide)
    delta = (grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = shares * (grad @ value.to(wide).transpose(-1, -2) - delta) * scale
    grad_query = grad_scores @ key.to(wide)
    grad_key = grad_scores.transpose(-1, -2) @ query.to(wide)
    return grad_query, grad_key, shares.transpose(-1, -2) @ grad
