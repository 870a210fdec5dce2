from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moaic.runtime.kernels.fused import rotary
from moaic.runtime.kernels.triton_launch import Tile
from tests.kernels.drawn import DTYPES, SEEDS, Source, must_fail, near, spoiled

TILE = Tile(rows=4, columns=16)


@dataclass(frozen=True)
class Case:
    batch: int
    heads: int
    tokens: int
    width: int
    dtype: torch.dtype
    normed: bool
    shared: bool
    """Whether all batches have the same positions."""
    swapped: bool
    """Whether heads come as [B, S, H, D], as a projection gives them."""
    seed: int


CASES = st.builds(
    Case,
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 4, 9]),
    st.sampled_from([2, 18, 32]),
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    SEEDS,
)


def holds(kernel: Any, case: Case) -> None:
    source, eps = Source(case.seed), 1e-2
    if case.swapped:
        x = source.normal((case.batch, case.tokens, case.heads, case.width), case.dtype).transpose(1, 2)
    else:
        x = source.normal((case.batch, case.heads, case.tokens, case.width), case.dtype)
    grad = source.normal(tuple(x.shape), case.dtype)
    angles = (1 if case.shared else case.batch, case.tokens, case.width)
    cos, sin = (source.normal(angles, torch.float32) for _ in range(2))
    weight = source.normal((case.width,), case.dtype) if case.normed else None
    options: dict[str, Any] = {"weight": weight, "eps": eps}

    wide = [each.double().requires_grad_() for each in (x, weight) if each is not None]
    want = rotary.reference(wide[0], cos.double(), sin.double(), wide[1] if case.normed else None, eps)
    wanted = torch.autograd.grad(want, wide, grad.double())
    largest = 1 + max(float(each.detach().abs().max()) for each in (want, *wanted)) if x.numel() else 1.0
    near(kernel.forward(x, cos, sin, TILE, **options), want.detach(), 1, 1e-6 * largest)
    dx, dweight = kernel.backward(grad, x, cos, sin, TILE, **options)
    near(dx, wanted[0], 1, 4e-6 * largest)
    assert (dweight is None) is not case.normed
    if case.normed:
        near(dweight, wanted[1], 4, 4e-6 * largest)


@given(CASES)
def check_rotary(case: Case) -> None:
    holds(rotary, case)


@pytest.mark.parametrize("width", [3, 34])
def check_heads_that_do_not_fit_are_refused(width: int) -> None:
    angles = torch.zeros(1, 2, width)
    with pytest.raises(ValueError, match=f"heads of {width} elements are odd, or do not fit"):
        rotary.forward(torch.zeros(1, 1, 2, width), angles, angles, TILE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a * c - b * s", "a * c + b * s"),
        ("b * d + a * t", "b * c + a * s"),
        ("second * d - first * s", "second * d + first * s"),
        ("first * c + second * t", "first * c + second * s"),
        ("- a * mean", ""),
        ("batch * angle_batch", "0"),
        ("head * x_head", "head * x_row"),
        ("/ (2 * half) + eps", "/ half + eps"),
        ("tl.program_id(0) * tl.num_programs(1) * tl.num_programs(2)", "tl.program_id(0)"),
        ("row < length", "row < length - 1"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(rotary, old, new, tmp_path), CASES)
