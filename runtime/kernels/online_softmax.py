"""Merging of attention over blocks of keys by an online softmax: the kernel `merge` in plain PyTorch."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor


def merged(out: Tensor, weight: Tensor, largest: Tensor, more: Tensor, logsumexp: Tensor) -> None:
    """Add a part to a total [B, H, S, D], in place, with the sum of weights and the largest logsumexp [B, H, S]."""
    larger = torch.maximum(largest, logsumexp)
    # A row without any key so far gets weight 0, not the NaN of -inf - -inf.
    finite = torch.where(larger == -inf, 0.0, larger)
    kept, share = torch.exp(largest - finite), torch.exp(logsumexp - finite)
    out.mul_(kept.unsqueeze(-1)).add_(more * share.unsqueeze(-1))
    weight.mul_(kept).add_(share)
    largest.copy_(larger)
