"""Keys hidden by a mask do not change attention, even if no attention kernel takes the operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

pytestmark = pytest.mark.usefixtures("accelerator")

attention: Any = F.scaled_dot_product_attention

OPERANDS = {
    "dropout": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), 0.5),
    "one head of keys": ((2, 4, 6, 8), (2, 1, 6, 8), (2, 1, 6, 8), 0.0),
    "wide values": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 12), 0.0),
    "three dims": ((4, 6, 8), (4, 6, 8), (4, 6, 8), 0.0),
    "wide values and dropout": ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 12), 0.5),
}

HIDDEN = 4
"""The first key that is padding, in every row."""


def causal_and_padded() -> Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    mask[:, HIDDEN:] = False
    return mask


@pytest.mark.parametrize("name", OPERANDS)
def test_a_bool_mask_hides(name: str) -> None:
    *shapes, dropout = OPERANDS[name]
    given = [torch.randn(shape) for shape in shapes]
    query, key, value = (tensor.to("moai").requires_grad_() for tensor in given)
    attention(query, key, value, causal_and_padded().to("moai"), dropout).sum().backward()
    for tensor in (key, value):
        assert tensor.grad is not None
        assert tensor.grad.cpu()[..., HIDDEN:, :].count_nonzero() == 0
        assert tensor.grad.cpu()[..., :HIDDEN, :].count_nonzero() > 0


@pytest.mark.parametrize("name", [name for name, (*_, dropout) in OPERANDS.items() if not dropout])
@pytest.mark.parametrize("rows", [0, 1])
def test_masked_attention_is_that_of_the_cpu(name: str, rows: int) -> None:
    """With rows that see nothing, too."""
    *shapes, _ = OPERANDS[name]
    mask = causal_and_padded()
    mask[:rows] = False
    results: list[list[Tensor]] = []
    given = [torch.randn(shape) for shape in shapes]
    for device in ("cpu", "moai"):
        operands = [tensor.detach().to(device).requires_grad_() for tensor in given]
        out = attention(*operands, mask.to(device))
        out.pow(2).sum().backward()
        grads = [operand.grad for operand in operands]
        results.append([tensor.detach().cpu() for tensor in (out, *grads) if tensor is not None])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
