"""Second derivatives of attention, compared with the CPU's, op by op in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.usefixtures("accelerator")

attention: Any = F.scaled_dot_product_attention

MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "bool": lambda: torch.ones(5, 5, dtype=torch.bool).tril(),
    "additive": lambda: torch.randn(5, 5, dtype=torch.float64),
}


def derivatives(device: str, mask: Tensor | None, is_causal: bool, shared: bool) -> list[Tensor]:
    """First, second and third ones; `shared` has one tensor be query, key and value."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    operands = [each.to(device).requires_grad_() for each in (drawn[:1] if shared else drawn)]
    query, key, value = operands * 3 if shared else operands
    with sdpa_kernel(SDPBackend.MATH):
        out = attention(query, key, value, None if mask is None else mask.to(device), is_causal=is_causal)
    found: list[Tensor] = []
    total: Tensor = out.pow(3).sum()
    for _ in range(3):
        grads = torch.autograd.grad(total, operands, create_graph=True)
        found += grads
        total = sum((each.square().sum() for each in grads), torch.zeros((), device=device))
    return [each.detach().cpu() for each in found]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", [*MASKS, "causal"])
def test_derivatives_of_derivatives(name: str, shared: bool) -> None:
    """For gradient penalties, Hessians and learning to learn."""
    mask = None if name == "causal" else MASKS[name]()
    found, expected = (derivatives(device, mask, name == "causal", shared) for device in ("moai", "cpu"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def test_transforms_of_functions_differentiate_attention() -> None:
    def loss(query: Tensor) -> Tensor:
        return attention(query, query * 2, query).square().sum()

    query = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    per_row: Any = torch.func.vmap(torch.func.grad(loss))
    for gradient in (torch.func.grad(loss), per_row):
        with sdpa_kernel(SDPBackend.MATH):
            expected = gradient(query)
        torch.testing.assert_close(gradient(query.to("moai")).cpu(), expected)
