"""Attention in captured graphs: one op forward, one backward, for every mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"


attention: Any = F.scaled_dot_product_attention


def boxed(graph: Any, _: Any) -> Any:
    """A compiled function as AOTAutograd wants it: it takes its arguments in a list."""

    def call(arguments: list[Any]) -> Any:
        return graph(*arguments)

    call._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return call


def capture(function: Any, *inputs: Tensor) -> tuple[Any, list[str]]:
    """The compiled function's result, and the ops of its joint graph."""
    ops: list[str] = []

    def partition(joint: Any, given: Any, *, num_fwd_outputs: int, **settings: Any) -> Any:
        ops.extend(str(node.target) for node in joint.graph.nodes if node.op == "call_function")
        assert all(node.meta["val"].device.type == MOAI for node in joint.graph.nodes if node.op == "placeholder")
        return default_partition(joint, given, num_fwd_outputs=num_fwd_outputs, **settings)

    def inference(graph: Any, _: Any) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return boxed(graph, _)

    backend = aot_autograd(
        fw_compiler=boxed,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=core_aten_decompositions(),
    )
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    return torch.compile(function, backend=backend, fullgraph=True)(*inputs), ops


@pytest.mark.parametrize("masked", [True, False])
def test_one_op_forward_and_one_backward(masked: bool) -> None:
    q, k, v = (torch.randn(2, heads, 6, 8).to(MOAI).requires_grad_() for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril().to(MOAI) if masked else None

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
        return out.transpose(1, 2).contiguous().pow(2).sum()

    result, ops = capture(loss, q, k, v)
    result.backward()
    assert (ops.count("moai.sdpa.default"), ops.count("moai.sdpa_backward.default")) == (1, 1)
    assert not any("softmax" in op or "bmm" in op for op in ops)
    found = [x.grad.cpu() for x in (q, k, v) if x.grad is not None]
    q.grad = k.grad = v.grad = None
    loss(q, k, v).backward()
    for captured, x in zip(found, (q, k, v), strict=True):
        assert x.grad is not None
        torch.testing.assert_close(captured, x.grad.cpu())


def test_inference_and_autocast() -> None:
    q = torch.randn(1, 2, 4, 8).to(MOAI)

    def attend(q: Tensor) -> Tensor:
        with torch.autocast(MOAI, dtype=torch.bfloat16):
            return attention(q, q, q)

    with torch.no_grad():
        result, ops = capture(attend, q)
    assert result.dtype == torch.bfloat16
    assert ops.count("moai.sdpa.default") == 1


def test_attention_with_dropout_is_taken_apart() -> None:
    def attend(q: Tensor) -> Tensor:
        return attention(q, q, q, dropout_p=0.5)

    q = torch.randn(1, 2, 4, 8).to(MOAI)
    with torch.no_grad():
        _, ops = capture(attend, q)
    assert "moai.sdpa.default" not in ops
