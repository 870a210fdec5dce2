"""Rewrites of attention into `moai.sdpa` and its backward, whose query, key and value have equal numbers of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moaic.capture.fx.op_call import OpCall, Rewrite, each_of, expanded, viewed
from moaic.capture.provenance import described
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Attr, Operand, Value
from moaic.ir.op_names import SDPA, SDPA_BACKWARD
from moaic.ir.types import TensorType


def _sdpa(call: OpCall) -> list[Value]:
    query, key, value, mask = call.operands
    operands = [query, _repeated_heads(call, query, key), _repeated_heads(call, query, value), mask]
    return call.builder.emit_many(SDPA, operands, call.types, _attention(call, query))


def _sdpa_backward(call: OpCall) -> list[Value]:
    grad, query, key, value, *rest = call.operands
    wide_key, wide_value = (_repeated_heads(call, query, x) for x in (key, value))
    operands = [grad, query, wide_key, wide_value, *rest]
    types = [call.types[0], wide_key.type, wide_value.type]
    grads = call.builder.emit_many(SDPA_BACKWARD, operands, types, _attention(call, query))
    return [_summed_over_copies(call, grad, type_) for grad, type_ in zip(grads, call.types, strict=True)]


def _repeated_heads(call: OpCall, query: Operand, x: Operand) -> Value:
    """Keys or values repeated so that every query head has its own; PyTorch's CPU kernel takes fewer (GQA)."""
    assert isinstance(query, Value)
    assert isinstance(x, Value)
    (batch, heads, *rest), query_heads = x.type.shape, query.type.shape[1]
    if heads == query_heads:
        return x
    groups = (batch, heads, query_heads // heads, *rest)
    repeated = expanded(call, viewed(call, x, (batch, heads, 1, *rest)), groups)
    return viewed(call, repeated, (batch, query_heads, *rest))


def _summed_over_copies(call: OpCall, grad: Value, type_: TensorType) -> Value:
    """The gradient of keys or values of `type_`: the sum over the copies of each head."""
    if grad.type == type_:
        return grad
    batch, heads, *rest = type_.shape
    groups = viewed(call, grad, (batch, heads, grad.type.shape[1] // heads, *rest))
    return call.emit("aten.sum.dim_IntList", groups, type_=type_, dim=(2,))


def _attention(call: OpCall, query: Operand) -> dict[str, Attr]:
    if call.attrs.get("dropout_p", 0.0):
        raise Diagnostic(f"attention with dropout must be taken apart{described(call.builder.loc)}")
    assert isinstance(query, Value)
    scale = call.attrs.get("scale")
    return {
        "is_causal": bool(call.attrs.get("is_causal", False)),
        "scale": query.type.shape[-1] ** -0.5 if scale is None else scale,
    }


ATTENTION_REWRITES: Final[Mapping[str, Rewrite]] = {
    **each_of("aten._scaled_dot_product_flash_attention_for_cpu moai.sdpa", _sdpa),
    **each_of("aten._scaled_dot_product_flash_attention_for_cpu_backward moai.sdpa_backward", _sdpa_backward),
}
