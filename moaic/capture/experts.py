"""Experts of a mixture, as a captured graph holds them: every token meets the experts that it was given, no others.

Libraries loop over the experts that have tokens, sort tokens by expert, or copy a matrix per token; a graph can hold
none of these without sizes that depend on values, or at the price of the copies. Here products name a matrix per row.
All forms compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moaic.runtime.codegen import grouped_mm


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What `forward` of a module of experts is to transformers, for any that its experts interface serves."""
    tokens, chosen = top_k_index.shape
    ids = top_k_index.reshape(-1)
    each = hidden_states.unsqueeze(1).expand(-1, chosen, -1).flatten(0, 1)
    up = _product(self, each, "gate_up_proj" if self.has_gate else "up_proj", ids)
    inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)
    out = _product(self, inner, "down_proj", ids)
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = (out * top_k_weights.reshape(-1, 1)).reshape(tokens, chosen, out.shape[-1])
    return weighted.sum(dim=1).to(hidden_states.dtype)


def _product(experts: Any, x: Tensor, name: str, ids: Tensor) -> Tensor:
    matrices: Tensor = getattr(experts, name)
    out = grouped_mm.grouped_mm(x, matrices.transpose(1, 2) if experts.is_transposed else matrices, ids)
    if not experts.has_bias:
        return out
    bias: Tensor = getattr(experts, f"{name}_bias")
    return out + torch.nn.functional.embedding(ids, bias)
