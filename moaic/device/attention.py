"""Scaled dot product attention as one op forward and one backward.

torch decomposes `scaled_dot_product_attention` on a device that it does not know into matmuls and a softmax. Here it is
`moai::sdpa(q, k, v, mask, is_causal, scale) -> (out, logsumexp)`, in eager programs and in captured graphs alike, and
each worker picks a kernel. Attention that the op does not support (dropout, odd shapes, `torch.func`) is decomposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from moaic.device import torch_private
from moaic.runtime.codegen import attention_math

aten: Final[Any] = torch.ops.aten

_SCHEMAS: Final = (
    "sdpa(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> (Tensor, Tensor)",
    "sdpa_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor? mask, "
    "bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
)


def _like_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Any:
    """Results with the memory layout of the CPU's."""
    batch, heads, length, _ = query.shape
    logsumexp = query.new_empty((batch, length, heads), dtype=attention_math.accumulator(query.dtype)).transpose(1, 2)
    return torch.empty_like(query), logsumexp


def _like_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Any:
    return tuple(
        torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        for t in (query, key, value)
    )


def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Any:
    """Eager attention, op by op; in captured graphs it stays one op, for which each worker picks a kernel."""
    out, saved = _like_sdpa(query, key, value, mask, is_causal, scale)
    result, logsumexp = attention_math.forward(query, key, value, mask, is_causal, scale)
    return out.copy_(result), saved.copy_(logsumexp)


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
    grads = attention_math.backward(grad, query, key, value, out, logsumexp, mask, is_causal, scale)
    return tuple(like.copy_(found) for like, found in zip(_like_backward(grad, query, key, value), grads, strict=True))


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
    """Second derivatives: attention is composed again and differentiated twice, op by op.

    Derivatives through `out` and `logsumexp` are included in those of query, key and value.
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
    """Attention that autograd differentiates op by op."""
    out, _ = attention_math.forward(query, key, value, mask, is_causal, scale)
    return out.to(query.dtype)


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
    asked = (query, key, value, attn_mask)
    is_one_op = not dropout_p and not torch_private.is_transforming() and _fits(*asked, enable_gqa)
    is_fused = is_one_op and _is_fused_on_the_cpu(*asked)
    if not is_one_op or (is_causal and attn_mask is not None and not is_fused):
        return _composite(*asked, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_causal and attn_mask is not None:
        attn_mask, is_causal = _also_causal(attn_mask, query, key), False
    key, value = _repeat_heads(key, query), _repeat_heads(value, query)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out = torch.ops.moai.sdpa(query, key, value, _four_dims(attn_mask), is_causal, factor)[0]
    return out if is_fused else out.contiguous()


_composite: Final[Callable[..., Tensor]] = aten.scaled_dot_product_attention.default.decompose
"""PyTorch's own decomposition: checks the operands, then composes matmul, softmax, dropout and matmul.

Unlike `_scaled_dot_product_attention_math` it converts a bool mask to an additive one.
"""


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Key or value heads repeated until there are as many as query heads."""
    times = query.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


def _four_dims(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[(None,) * (4 - mask.dim())]


def _also_causal(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """`mask` combined with the causal mask."""
    seen = torch.ones((query.shape[2], key.shape[2]), dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def _fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    """Whether attention kernels accept these operands."""
    if not query.dim() == key.dim() == value.dim() == 4 or not query.is_floating_point():
        return False
    if not query.dtype == key.dtype == value.dtype or not query.device == key.device == value.device:
        return False
    (batch, heads, length, width), (_, groups, keys, _) = query.shape, key.shape
    if key.shape != value.shape or (key.shape[0], key.shape[3]) != (batch, width):
        return False
    if 0 in (batch, heads, length, width, groups, keys):
        return False
    if heads % groups if enable_gqa else heads != groups:
        return False
    return mask is None or _mask_fits(mask, query, key)


def _mask_fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    if mask.requires_grad or mask.dtype not in (torch.bool, query.dtype) or mask.device != query.device:
        return False
    scores = (*query.shape[:3], key.shape[2])
    if mask.size(-2) not in (1, scores[2]) or mask.dim() > 4:
        return False
    return all(size in (1, full) for size, full in zip(mask.shape, scores[-mask.dim() :], strict=True))


def _is_fused_on_the_cpu(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the CPU's fused kernel accepts operands that fit.

    It then decides the memory layout of the results, and takes a mask together with `is_causal`.
    """
    return all(tensor.stride(-1) == 1 for tensor in (query, key, value)) and (mask is None or mask.dim() != 3)


def install() -> None:
    """Define the two ops, and dispatch torch's attention on the device to them."""
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
"""Keeps the definitions alive: they end with the library object."""
