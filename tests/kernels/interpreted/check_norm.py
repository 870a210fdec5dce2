from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moaic.runtime.kernels.fused import norm
from moaic.runtime.kernels.triton_launch import Tile
from tests.kernels.drawn import DTYPES, ROUNDING, SEEDS, Source, must_fail, near, shapes, spoiled

TILE = Tile(columns=64, programs=3)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    layer: bool
    bias: bool
    residual: bool
    through: bool
    middle: float
    """Of the numbers: far from zero the mean matters."""
    seed: int


CASES = st.builds(
    Case,
    shapes(longest=64),
    DTYPES,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 2.0]),
    SEEDS,
)


def holds(kernel: Any, case: Case) -> None:
    source, width, eps = Source(case.seed), case.shape[-1:], 1e-3
    x = source.normal(case.shape, case.dtype) + case.middle
    residual = source.normal(case.shape, case.dtype) if case.residual else None
    weight = source.normal(width, case.dtype)
    bias = source.normal(width, case.dtype) if case.bias and case.layer else None
    made = kernel.forward(x, weight, eps, TILE, residual=residual, bias=bias, layer=case.layer)
    near(made.total, x.double() + (0 if residual is None else residual.double()), 1)

    # The norm is that of the sum as it is kept.
    wide = [None if each is None else each.double().requires_grad_() for each in (made.total, weight, bias)]
    total, by, plus = wide
    assert total is not None
    assert by is not None
    want, _ = norm.reference(total, by, eps, bias=plus, layer=case.layer)
    near(made.y, want.detach(), 1, 1e-5)

    grad = source.normal(case.shape, case.dtype)
    through = source.normal(case.shape, case.dtype) if case.through else None
    wanted = torch.autograd.grad(want, [each for each in wide if each is not None], grad.double())
    gradients = kernel.backward(grad, weight, made, TILE, through=through, bias=bias is not None)
    # Sums over a row or a column, each summand off by a few last places.
    slack = 1e-4 * (1 + float(made.scale.max() if made.scale.numel() else 0.0))
    near(gradients.x, wanted[0] + (0 if through is None else through.double()), 1, slack + ROUNDING[torch.float32])
    near(gradients.weight, wanted[1], 4, 1e-4)
    if bias is not None:
        near(gradients.bias, wanted[2], 4, 1e-5)


@given(CASES)
def check_norm(case: Case) -> None:
    holds(norm, case)


def check_rows_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 65 elements do not fit into a tile of 64"):
        norm.forward(torch.zeros(2, 65), torch.ones(65), 1e-5, TILE, layer=False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/ width + eps)", "/ COLUMNS + eps)"),
        ("tl.where(inside, h - middle, 0.0)", "h - middle"),
        ("out -= tl.sum(g, 0) / width", "out -= 0"),
        ("- h * (tl.sum(g * h, 0) / width)", ""),
        ("to_weight += g * h", "to_weight = g * h"),
        ("row * residual_row", "row * 0"),
        ("tl.store(total + row * width + at, h", "tl.store(total + row * width + at, h * 0"),
        ("if THROUGH:", "if THROUGH and LAYER:"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(norm, old, new, tmp_path), CASES)
