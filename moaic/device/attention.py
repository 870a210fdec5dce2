"""Scaled dot product attention as one op forward and one backward.

On a device that torch does not know, `scaled_dot_product_attention` falls apart into matmuls and a softmax. Here it is
`moai::sdpa(q, k, v, mask, is_causal, scale) -> (out, logsumexp)`, in eager programs and in captured graphs alike, and
every worker picks its own kernel. What the op cannot do (attention dropout, odd shapes, `torch.func`) is decomposed.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from moaic.device import torch_private

aten: Final[Any] = torch.ops.aten

_SCHEMAS: Final = (
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> (Tensor, Tensor)",
    "sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor? mask, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)


def _like_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Any:
    """Geometry of the results: both lie as [batch, sequence, heads, ...] in memory, as the next matmul wants them."""
    batch, heads, length, width = query.shape
    out = query.new_empty((batch, length, heads, width)).transpose(1, 2)
    logsumexp = query.new_empty((batch, length, heads), dtype=_accumulator(query.dtype)).transpose(1, 2)
    return out, logsumexp


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _like_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(
        torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        for t in (query, key, value)
    )


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    """What the softmax is taken of, in the accumulator's type."""
    wide = _accumulator(query.dtype)
    scores = (query.to(wide) @ key.to(wide).transpose(-1, -2)) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        return scores.masked_fill(~seen, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    """The softmax; rows that see nothing are zeros."""
    finite = logsumexp.masked_fill(logsumexp == -math.inf, 0.0)
    return (scores - finite.unsqueeze(-1)).exp()


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Any:
    """Eager attention, op by op; in captured graphs the op stays whole and is the workers' business."""
    out, saved = _like_sdpa(query, key, value, mask, is_causal, scale)
    scores = _scores(query, key, mask, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    weights = _weights(scores, logsumexp)
    return out.copy_(weights @ value.to(weights.dtype)), saved.copy_(logsumexp)


def _sdpa_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Any:
    wide = _accumulator(query.dtype)
    grads = _like_backward(grad, query, key, value)
    weights = _weights(_scores(query, key, mask, is_causal, scale), logsumexp)
    wide_grad = grad.to(wide)
    delta = (wide_grad * out.to(wide)).sum(-1, keepdim=True)
    grad_scores = weights * (wide_grad @ value.to(wide).transpose(-1, -2) - delta) * scale
    grads[0].copy_(grad_scores @ key.to(wide))
    grads[1].copy_(grad_scores.transpose(-1, -2) @ query.to(wide))
    grads[2].copy_(weights.transpose(-1, -2) @ wide_grad)
    return grads


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, ctx.is_causal, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, mask, *output)


def _differentiate(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    gradients = torch.ops.moai.sdpa_backward(grad, query, key, value, out, logsumexp, mask, ctx.is_causal, ctx.scale)
    return (*gradients, None, None, None)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    grad, query, key, value, _, _, mask, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(grad, query, key, value, mask)


def _differentiate_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Derivatives of the gradients, through the attention that they belong to, op by op.

    What reaches the gradients by way of `out` and `logsumexp` is counted in those of query, key and value.
    """
    *inputs, mask = ctx.saved_tensors
    with torch.enable_grad():
        # One tensor may stand for several operands, and each has a derivative of its own.
        aliases = [tensor.view_as(tensor) if tensor.requires_grad else tensor.detach() for tensor in inputs]
        grad, query, key, value = (alias.requires_grad_() for alias in aliases)
        out = _composed(query, key, value, mask, ctx.is_causal, ctx.scale)
        first = torch.autograd.grad(out, (query, key, value), grad, create_graph=True)
        second = torch.autograd.grad(first, (grad, query, key, value), grads, create_graph=True)
    return (*second, None, None, None, None, None)


def _composed(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = _scores(query, key, mask, is_causal, scale)
    weights = _weights(scores, scores.logsumexp(-1))
    return (weights @ value.to(weights.dtype)).to(query.dtype)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on device moai."""
    if enable_gqa and min(query.dim(), key.dim(), value.dim()) > 2:
        key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    mask = _four_dims(attn_mask)
    if dropout_p > 0 or torch_private.is_transforming() or not _fits(query, key, value, mask, is_causal):
        return _decomposed(query, key, value, _additive(attn_mask, query), dropout_p, is_causal, scale)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return torch.ops.moai.sdpa(query, key, value, mask, is_causal, factor)[0]


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Key or value heads repeated until there are as many as query heads."""
    heads, wanted = tensor.shape[-3], query.shape[-3]
    if heads == wanted:
        return tensor
    if heads == 0 or wanted % heads:
        raise RuntimeError(f"enable_gqa needs the {wanted} heads of the query to be a multiple of the {heads} heads")
    return tensor.repeat_interleave(wanted // heads, dim=-3)


def _four_dims(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    return mask[(None,) * (4 - mask.dim())] if mask.dim() < 4 else mask


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether attention kernels take these operands."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.is_floating_point():
        return False
    batch, heads, length, width = query.shape
    if key.shape != value.shape or key.shape[:2] != (batch, heads) or key.shape[3] != width:
        return False
    if not query.dtype == key.dtype == value.dtype or 0 in (batch, heads, length, width, key.shape[2]):
        return False
    return mask is None or (not is_causal and _mask_fits(mask, query, key))


def _mask_fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    room = (*query.shape[:3], key.shape[2])
    if mask.requires_grad or mask.dim() != 4 or mask.dtype not in (torch.bool, query.dtype):
        return False
    return all(size in (1, full) for size, full in zip(mask.shape, room, strict=True))


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask to add to the scores; what is decomposed below would add 0 and 1 of a bool one, and hide nothing."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)


def _decomposed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Matmul, softmax, dropout, matmul."""
    return aten._scaled_dot_product_attention_math.default(
        query, key, value, mask, dropout_p, is_causal, None, scale=scale
    )[0]


def install() -> None:
    """Define the two ops and let torch's attention on the device be them."""
    library: Any = torch.library.Library("moai", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _LIBRARIES.append(library)
    library.impl("sdpa", _sdpa, "PrivateUse1")
    library.impl("sdpa_backward", _sdpa_backward, "PrivateUse1")
    torch.library.register_fake("moai::sdpa", _like_sdpa, lib=library)
    torch.library.register_fake("moai::sdpa_backward", _like_backward, lib=library)
    torch.library.register_autograd("moai::sdpa", _differentiate, setup_context=_save, lib=library)
    torch.library.register_autograd(
        "moai::sdpa_backward", _differentiate_backward, setup_context=_save_backward, lib=library
    )
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        torch_private.Registry("aten", key).add("aten::scaled_dot_product_attention", attend)


_LIBRARIES: Final[list[Any]] = []
"""Keeps the definitions: they end with the object that made them."""
