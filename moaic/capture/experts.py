"""Experts of a mixture, as a captured graph computes them: a token is multiplied by the matrices of its experts only.

Libraries loop over the experts that have tokens, or sort tokens by expert, which makes sizes depend on values; or they
copy a matrix per token. Here the product takes the index of a matrix per row. All forms compute the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moaic.runtime.codegen import grouped_mm


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`forward` for every module of experts that uses transformers' experts interface."""
    tokens, chosen = top_k_index.shape
    ids = top_k_index.reshape(-1)
    each = hidden_states.unsqueeze(1).expand(-1, chosen, -1).flatten(0, 1)
    up = _product(self, each, "gate_up_proj" if self.has_gate else "up_proj", ids)
    inner = self._apply_gate(up) if self.has_gate else self.act_fn(up)
    out = _product(self, inner, "down_proj", ids)
    # Releases of transformers up to 5.18 do not have it.
    if getattr(self, "has_post_expert_norm", False):
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
