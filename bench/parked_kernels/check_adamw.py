from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moaic.runtime.kernels.triton_launch import Tile
from parked_kernels import adamw
from tests.kernels.drawn import DTYPES, SEEDS, Source, must_fail, near, spoiled


@dataclass(frozen=True)
class Case:
    count: int
    dtype: torch.dtype
    copied: bool
    step: int
    scale: float
    settings: adamw.AdamW
    seed: int


CASES = st.builds(
    Case,
    st.sampled_from([0, 1, 31, 64, 200]),
    DTYPES,
    st.booleans(),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([1.0, 0.03, 2.0**-16]),
    st.sampled_from([adamw.AdamW(), adamw.AdamW(lr=0.1, beta1=0.5, beta2=0.95, eps=1e-3, weight_decay=0.3)]),
    SEEDS,
)


def holds(kernel: Any, case: Case) -> None:
    source, size = Source(case.seed), (case.count,)
    master, mean, square = (source.normal(size, torch.float32) for _ in range(3))
    square.abs_()
    grad, scale = source.normal(size, case.dtype), torch.tensor(case.scale)
    copy = source.normal(size, case.dtype) if case.copied else None
    wide, g, m, v, s = (each.double().clone() for each in (master, grad, mean, square, scale))
    kernel.update(master, grad, mean, square, scale, case.step, case.settings, Tile(columns=64), copy)
    adamw.reference(wide, g, m, v, s, case.step, case.settings)
    # Means are sums of numbers of either sign: their error is that of the summands.
    near(mean, m, 4, 1e-6)
    near(square, v, 8)
    # Float32 settings move the rate and the decay in their last place; a step is a small multiple of the rate.
    near(master, wide, 4, 1e-5 * case.settings.lr * (1 + m.abs() / (v.sqrt() + case.settings.eps)))
    if copy is not None:
        near(copy, master.double(), 1)


@given(CASES)
def check_adamw(case: Case) -> None:
    holds(adamw, case)


@given(st.integers(1, 5), SEEDS)
def check_reference_is_that_of_torch(step: int, seed: int) -> None:
    source, settings = Source(seed), adamw.AdamW(lr=0.1, weight_decay=0.3)
    master, grad, mean, square = (source.normal((7,), torch.float64).clone() for _ in range(4))
    square.abs_()
    weight = master.clone().requires_grad_()
    weight.grad = 0.5 * grad
    optimizer = torch.optim.AdamW([weight], lr=settings.lr, weight_decay=settings.weight_decay, foreach=False)
    state = {"step": torch.tensor(float(step - 1)), "exp_avg": mean.clone(), "exp_avg_sq": square.clone()}
    optimizer.state[weight] = state
    optimizer.step()
    adamw.reference(master, grad, mean, square, torch.tensor(0.5, dtype=torch.float64), step, settings)
    torch.testing.assert_close(master, weight.detach())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.load(scale)", "1"),
        ("/ root + eps", "+ eps"),
        ("p = p * kept", "p = p"),
        ("inside = at < count", "inside = at < count - 1"),
        ("copy + at * copy_stride", "copy + at"),
        ("rest2 * g * g", "rest2 * g"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(adamw, old, new, tmp_path), CASES)
