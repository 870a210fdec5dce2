"""Attention in captured graphs: one op forward, one backward, for every mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.usefixtures("accelerator")

MOAI = "moai"


def capture(function: Any, *inputs: Tensor) -> tuple[Any, list[str]]:
    """The compiled function's result, and the ops of its joint graph."""
    from functorch.compile import make_boxed_func

    ops: list[str] = []

    def partition(joint: Any, given: Any, *, num_fwd_outputs: int, **settings: Any) -> Any:
        ops.extend(str(node.target) for node in joint.graph.nodes if node.op == "call_function")
        assert all(node.meta["val"].device.type == MOAI for node in joint.graph.nodes if node.op == "placeholder")
        return default_partition(joint, given, num_fwd_outputs=num_fwd_outputs, **settings)

    def inference(graph: Any, _: Any) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph),
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=torch._decomp.core_aten_decompositions(),  # pyright: ignore[reportPrivateUsage]
    )
    torch._dynamo.reset()  # pyright: ignore[reportPrivateUsage]
    return torch.compile(function, backend=backend, fullgraph=True)(*inputs), ops


@pytest.mark.parametrize("masked", [True, False])
def test_one_op_forward_and_one_backward(masked: bool) -> None:
    q, k, v = (torch.randn(2, heads, 6, 8).to(MOAI).requires_grad_() for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril().to(MOAI) if masked else None

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not masked, enable_gqa=True)
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
            return F.scaled_dot_product_attention(q, q, q)

    with torch.no_grad():
        result, ops = capture(attend, q)
    assert result.dtype == torch.bfloat16
    assert ops.count("moai.sdpa.default") == 1


def test_attention_with_dropout_is_taken_apart() -> None:
    q = torch.randn(1, 2, 4, 8).to(MOAI)
    with torch.no_grad():
        _, ops = capture(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), q)
    assert "moai.sdpa.default" not in ops
