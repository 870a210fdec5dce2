"""Attention over parts of the keys, put together as the parts come: what the kernel `merge` is beside, in PyTorch."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


def merged(out: Tensor, weight: Tensor, largest: Tensor, more: Tensor, logsumexp: Tensor) -> None:
    """Adds a part to a total [B, H, S, D], in place, with the sum of weights and the largest logsumexp [B, H, S]."""
    larger = torch.maximum(largest, logsumexp)
    # A row that has seen no key yet has no weight at all, rather than -inf - -inf.
    finite = torch.where(larger == -inf, 0.0, larger)
    kept, share = torch.exp(largest - finite), torch.exp(logsumexp - finite)
    out.mul_(kept.unsqueeze(-1)).add_(more * share.unsqueeze(-1))
    weight.mul_(kept).add_(share)
    largest.copy_(larger)
