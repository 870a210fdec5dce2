"""Attention has one implementation: the eager ops of the device and the lowered ones give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moaic.device import attention
from moaic.ir.graph import Op, Value
from moaic.ir.types import TensorType
from moaic.runtime.codegen import lower_attention
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.dtypes import DTYPE_NAMES

eager: Callable[..., tuple[Tensor, Tensor]] = vars(attention)["_sdpa"]
eager_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = vars(attention)["_sdpa_backward"]
"""What the device runs op by op; here on tensors of the host."""

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MASKS = ["none", "bool", "numbers", "hidden rows"]


def never(*operands: object) -> bool:
    return False


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0))


def drawn_mask(kind: str, shape: tuple[int, ...], dtype: torch.dtype, random: torch.Generator) -> Tensor | None:
    numbers = torch.randn(shape, generator=random, dtype=torch.float64)
    if kind == "none":
        return None
    if kind == "hidden rows":
        return (numbers > 0) & (torch.arange(shape[-2]).unsqueeze(-1) % 2 == 0)
    return numbers > 0 if kind == "bool" else numbers.masked_fill(numbers > 1, -inf).to(dtype)


def value_of(tensor: Tensor) -> Value:
    return Value(TensorType(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))


def lowered(name: str, operands: list[Tensor], mask: Tensor | None, **attrs: Any) -> tuple[Tensor, ...]:
    masks = [] if mask is None else [mask]
    values = tuple(value_of(tensor) for tensor in (*operands, *masks))
    return run_op(Op(name, values, values[:2], attrs), [*operands, *masks], torch.device("cpu"))


@settings(
    max_examples=120, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(MASKS),
    st.booleans(),
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 4, 8])),
    st.sampled_from([0.125, 1.0, 0.3]),
    st.integers(0, 1 << 30),
)
def test_eager_and_lowered_attention_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    mask_kind: str,
    causal: bool,
    sizes: tuple[int, int, int, int, int],
    scale: float,
    seed: int,
) -> None:
    """Without a kernel that takes the operands, as none takes those of the device."""
    monkeypatch.setattr(lower_attention, "_flash_takes", never)
    random = torch.Generator().manual_seed(seed)
    batch, heads, rows, keys, width = sizes
    lengths = (rows, keys, keys, rows)
    query, key, value, grad = (
        torch.randn(batch, heads, length, width, generator=random, dtype=torch.float64).to(dtype) for length in lengths
    )
    mask = drawn_mask(mask_kind, (batch, 1, rows, keys), dtype, random)
    out, logsumexp = eager(query, key, value, mask, causal, scale)
    attrs = {"is_causal": causal, "scale": scale}
    results = lowered("moai.sdpa", [query, key, value], mask, **attrs)
    assert all(map(same_bits, (out, logsumexp), results))
    grads = eager_backward(grad, query, key, value, out, logsumexp, mask, causal, scale)
    operands = [grad, query, key, value, out, logsumexp]
    assert all(map(same_bits, grads, lowered("moai.sdpa_backward", operands, mask, **attrs)))


def test_dropout_is_left_to_pytorch() -> None:
    """Neither form has it: PyTorch's own decomposition draws what is dropped."""
    query = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    dropped = attention.attend(query, query, query, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5))
