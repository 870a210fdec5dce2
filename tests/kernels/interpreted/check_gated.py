from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moaic.runtime.kernels.fused import gated
from moaic.runtime.kernels.triton_launch import Tile
from tests.kernels.drawn import DTYPES, SEEDS, Source, must_fail, near, shapes, spoiled

TILE = Tile(columns=16)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...]
    dtype: torch.dtype
    act: gated.Act
    halves: bool
    """Of one matrix, as a fused projection gives them."""
    seed: int


CASES = st.builds(Case, shapes(), DTYPES, st.sampled_from(gated.Act), st.booleans(), SEEDS)


def holds(kernel: Any, case: Case) -> None:
    source = Source(case.seed)
    both = source.normal((*case.shape[:-1], 2 * case.shape[-1]), case.dtype)
    gate, up = both.chunk(2, -1) if case.halves else (source.normal(case.shape, case.dtype) for _ in range(2))
    grad = source.normal(case.shape, case.dtype)
    wide = [each.double().requires_grad_() for each in (gate, up)]
    want = gated.reference(wide[0], wide[1], case.act)
    wanted = torch.autograd.grad(want, wide, grad.double())
    near(kernel.forward(gate, up, case.act, TILE), want.detach(), 1, 3e-6)
    for got, exact in zip(kernel.backward(grad, gate, up, case.act, TILE), wanted, strict=True):
        near(got, exact, 1, 1e-5)


@given(CASES)
def check_gated(case: Case) -> None:
    holds(gated, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.044715 * g * g * g", "0.0447 * g * g"),
        ("1.5957691216057308 * (1 + 3", "1.5957691216057308 * (1 + 2"),
        ("0.7071067811865476", "0.7"),
        ("0.3989422804014327", "0.4"),
        ("slope = share * (1 - share)\n", "slope = share\n"),
        ("row * up_row", "row * 0"),
        ("inside = at < width", "inside = at < width - 1"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(gated, old, new, tmp_path), CASES)
