"""Attention, `moai.sdpa` and its backward, as torch calls: a kernel of PyTorch for the operands, or plain math."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from moaic.ir.attention import is_causal
from moaic.ir.graph import Op
from moaic.runtime.codegen import attention_math
from moaic.runtime.codegen.gpu_attention import Attention, library_for


def sdpa(op: Op, operands: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor]:
    """The result and its logsumexp, from query, key, value and a mask if there is one."""
    query, key, value, *masks = operands
    mask = _additive(masks[0] if masks else None, query)
    causal, scale = _attributes(op, query)
    if _flash_takes(query, value, mask, device):
        out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_in_rows, (query, key, value)), 0.0, causal, attn_mask=mask, scale=scale
        )
        return out, logsumexp
    attention = Attention(query, key, value, mask, causal, scale)
    if library := library_for(attention, device):
        return library.forward(attention)
    out, logsumexp = attention_math.forward(query, key, value, mask, causal, scale)
    return out.to(query.dtype), logsumexp


def sdpa_backward(op: Op, operands: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    grad, query, key, value, out, logsumexp, *masks = operands
    mask = _additive(masks[0] if masks else None, query)
    causal, scale = _attributes(op, query)
    if _flash_takes(query, value, mask, device):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, *map(_in_rows, (query, key, value, out)), logsumexp, 0.0, causal, attn_mask=mask, scale=scale
        )
    attention = Attention(query, key, value, mask, causal, scale)
    if library := library_for(attention, device):
        return library.backward(attention, grad, out, logsumexp)
    grads = attention_math.backward(grad, query, key, value, out, logsumexp, mask, causal, scale)
    return grads[0].to(query.dtype), grads[1].to(key.dtype), grads[2].to(value.dtype)


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask as numbers to add to the scores, of as many dims as the query."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, float("-inf"))
    while mask.dim() < query.dim():
        mask = mask.unsqueeze(0)
    return mask


def _attributes(op: Op, query: Tensor) -> tuple[bool, float]:
    """The causal flag and the scale."""
    scale: Any = op.attrs.get("scale")
    return is_causal(op), query.shape[-1] ** -0.5 if scale is None else float(scale)


def _flash_takes(query: Tensor, value: Tensor, mask: Tensor | None, device: torch.device) -> bool:
    """Whether PyTorch's flash attention for CPUs is legal here."""
    return (
        device.type == "cpu"
        and query.dim() == 4
        and query.shape[-1] == value.shape[-1]
        and prod(query.shape) > 0
        and (mask is None or mask.dtype in (query.dtype, torch.float32))
    )


def _in_rows(x: Tensor) -> Tensor:
    """`x` with stride 1 along the last dim: the kernel reads rows without checking their stride."""
    return x if x.stride(-1) == 1 else x.contiguous()
