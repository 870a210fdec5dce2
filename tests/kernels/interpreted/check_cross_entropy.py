from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from moaic.runtime.kernels.fused import cross_entropy
from moaic.runtime.kernels.triton_launch import Tile
from tests.kernels.drawn import DTYPES, ROUNDING, SEEDS, Source, must_fail, near, spoiled

TILE = Tile(rows=16, columns=16, inner=16, programs=2)


@dataclass(frozen=True)
class Case:
    tokens: int
    width: int
    ranks: tuple[int, ...]
    """Classes of each rank."""
    dtype: torch.dtype
    scale: float
    smoothing: float
    soft_cap: float | None
    seed: int


CASES = st.builds(
    Case,
    st.sampled_from([0, 1, 15, 16, 21]),
    st.sampled_from([1, 16, 19]),
    st.lists(st.sampled_from([0, 1, 16, 35]), min_size=1, max_size=3).filter(any).map(tuple),
    DTYPES,
    st.sampled_from([0.2, 3.0]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, 5.0]),
    SEEDS,
)


def labels_of(case: Case) -> Tensor:
    """About every fourth token is ignored."""
    random = torch.Generator(torch.get_default_device()).manual_seed(case.seed)
    labels = torch.randint(sum(case.ranks), (case.tokens,), generator=random)
    return torch.where(torch.rand(case.tokens, generator=random) < 0.25, -100, labels)


def holds(kernel: Any, case: Case) -> None:
    source, classes, labels = Source(case.seed), sum(case.ranks), labels_of(case)
    x = (case.scale * source.normal((case.tokens, case.width), torch.float32)).to(case.dtype)
    weight = source.normal((classes, case.width), case.dtype)
    grad = source.normal((case.tokens,), torch.float32)
    options: dict[str, Any] = {"smoothing": case.smoothing, "soft_cap": case.soft_cap}
    logits = (x.double() @ weight.double().T).requires_grad_()
    unit = torch.eye(classes, dtype=torch.float64)
    want = cross_entropy.reference(logits, unit, labels, **options)
    (delta,) = torch.autograd.grad(want, logits, grad.double())
    # What float32 loses in a logit, and the exponential hands on.
    slack = 1e-6 * (1 + float(logits.detach().abs().max()) if case.tokens else 0.0)

    firsts = [sum(case.ranks[:rank]) for rank in range(len(case.ranks))]
    shards: tuple[Tensor, ...] = torch.split(weight, list(case.ranks))
    parts = [
        kernel.forward(x, shard, labels, TILE, first=first, soft_cap=case.soft_cap)
        for shard, first in zip(shards, firsts, strict=True)
    ]
    whole = kernel.merged(parts)
    near(kernel.losses(whole, labels, classes, case.smoothing), want.detach(), 4, 4 * slack)

    # The share of each class is rounded to the elements' type before it is multiplied.
    off = 2 * ROUNDING[case.dtype] * delta.abs() + slack * grad.abs().double()[:, None]
    made = [
        kernel.backward(grad, x, shard, labels, whole.logsumexp(), TILE, classes=classes, first=first, **options)
        for shard, first in zip(shards, firsts, strict=True)
    ]
    dx, dweight = torch.stack([each[0] for each in made]).sum(0), torch.cat([each[1] for each in made])
    near(dx, delta @ weight.double(), 4, off @ weight.double().abs())
    near(dweight, delta.T @ x.double(), 4, off.T @ x.double().abs())


# The only class is so unlikely that a class past the end would have a gradient beyond float16.
@example(Case(15, 16, (1,), torch.float16, 3.0, 0.0, None, 0))
@given(CASES)
def check_cross_entropy(case: Case) -> None:
    holds(cross_entropy, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("summed * tl.exp(highest - higher)", "summed"),
        ("- first\n    begin", "\n    begin"),
        ("tl.sum(tl.where(here, z, 0.0), 1)", "tl.sum(tl.where(here, z, 0.0), 1) * 1.01"),
        ("delta *= 1 - (z / SOFT_CAP) * (z / SOFT_CAP)", "delta *= 1"),
        ("tl.where(hit, on, 0.0) - off", "tl.where(hit, on, 0.0)"),
        ("torch.where(labels == IGNORED, 0.0, grad.float())", "grad.float()"),
        ("tl.dot(rows, columns, product,", "tl.dot(rows, columns, product * 0.5,"),
        ("k[None, :]\n        right", "k[None, :] * 0\n        right"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(cross_entropy, old, new, tmp_path), CASES)
