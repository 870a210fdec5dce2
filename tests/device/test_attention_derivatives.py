"""Attention beside the CPU's, op by op in float64: any operands and masks, and derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


@dataclass(frozen=True)
class Case:
    """Operands of one attention, drawn from `seed`."""

    seed: int
    batch: tuple[int, ...]
    heads: tuple[int, int]
    lengths: tuple[int, int]
    widths: tuple[int, int]
    mask: str
    mask_shape: tuple[int, ...]
    learned: bool
    strided: bool

    def operands(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        (heads, fewer), (rows, keys), (width, wide) = self.heads, self.lengths, self.widths
        sizes = ((heads, rows, width), (fewer, keys, width), (fewer, keys, wide))
        shapes = [(*self.batch, *(size if self.batch else size[1:])) for size in sizes]
        drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        return [each.mT.contiguous().mT if self.strided else each for each in drawn]

    def masking(self) -> Tensor | None:
        if self.mask in ("none", "causal"):
            return None
        drawn = torch.randn(self.mask_shape, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        return drawn > 0 if self.mask == "bool" else drawn


@st.composite
def cases(draw: st.DrawFn) -> Case:
    batch = draw(st.sampled_from([(2,), (1,), (2, 2), ()]))
    heads = draw(st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)]))
    lengths = draw(st.sampled_from([(5, 5), (3, 6), (1, 4)]))
    widths = draw(st.sampled_from([(4, 4), (4, 6), (1, 2)]))
    mask = draw(st.sampled_from(["none", "causal", "bool", "additive"]))
    full = (*batch, *(heads[:1] if batch else ()), *lengths)
    kept = draw(st.integers(2, len(full)))
    sizes = [size if draw(st.booleans()) else 1 for size in full[-kept:]]
    learned = mask == "additive" and draw(st.booleans())
    return Case(
        draw(st.integers(0, 99)), batch, heads, lengths, widths, mask, tuple(sizes), learned, draw(st.booleans())
    )


def results(case: Case, device: str) -> list[Tensor]:
    """The output and the gradients of what requires one."""
    operands = [each.detach().to(device).requires_grad_() for each in case.operands()]
    mask = case.masking()
    if mask is not None:
        mask = mask.to(device).requires_grad_(case.learned)
    grouped = bool(case.batch) and case.heads[0] != case.heads[1]
    out = attention(*operands, mask, is_causal=case.mask == "causal", enable_gqa=grouped)
    wanted = [*operands, *([mask] if mask is not None and case.learned else [])]
    return [each.detach().cpu() for each in (out, *torch.autograd.grad(out.square().sum(), wanted))]


@given(cases())
def test_attention_is_that_of_the_cpu(case: Case) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected = results(case, "cpu")
    for one, other in zip(results(case, "moai"), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


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
