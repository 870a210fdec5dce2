from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Op, Value
from moaic.ir.types import TensorType
from moaic.runtime.codegen.lower_to_fx import run_op
from moaic.runtime.kernels.triton_launch import Tile
from parked_kernels import dropout
from tests.kernels.drawn import DTYPES, SEEDS, Source, must_fail, near, spoiled

TILE = Tile(columns=16)


@dataclass(frozen=True)
class Case:
    """A rank's part: `ranks` along each dim, of which it is the one at `at`."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    inner: tuple[int, ...]
    """How many neighbors along a dim stay together."""
    at: tuple[int, ...]
    large: bool
    """Whether what it is part of has more elements than 32 bits count."""
    dtype: torch.dtype
    p: float
    key: tuple[int, int]
    seed: int

    @property
    def global_shape(self) -> tuple[int, ...]:
        whole = tuple(size * ranks for size, ranks in zip(self.shape, self.ranks, strict=True))
        return (*whole[:-1], whole[-1] + (1 << 40)) if self.large else whole

    @property
    def splits(self) -> list[list[int]]:
        return [[dim, stride, ranks] for dim, (stride, ranks) in enumerate(zip(self.inner, self.ranks, strict=True))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dims = draw(st.integers(1, 3))
    inner = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    counts = [draw(st.integers(1 if dim else 0, 7 if dim + 1 == dims else 3)) for dim in range(dims)]
    shape = tuple(a * b for a, b in zip(inner, counts, strict=True))
    ranks = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    at = tuple(draw(st.integers(0, each - 1)) for each in ranks)
    word = st.integers(0, (1 << 32) - 1)
    p, key = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), draw(st.tuples(word, word))
    return Case(shape, ranks, inner, at, draw(st.booleans()), draw(DTYPES), p, key, draw(SEEDS))


def uniform(case: Case, key: Tensor, coordinates: list[Tensor]) -> Tensor:
    """The interpreter's word."""
    values = [Value(TensorType("i64", tuple(each.shape))) for each in (key, *coordinates)]
    attrs: dict[str, Any] = {"global_shape": list(case.global_shape), "splits": case.splits}
    op = Op("moai.rand", tuple(values), (Value(TensorType("f32", case.shape)),), attrs)
    return run_op(op, [key, *coordinates], key.device)[0]


def holds(kernel: Any, case: Case) -> None:
    key, coordinates = torch.tensor(case.key), [torch.tensor(each) for each in case.at]
    place = kernel.place_of(case.shape, case.global_shape, case.splits, coordinates, key.device)
    drawn = uniform(case, key, coordinates)
    assert torch.equal(kernel.numbers(key, place, TILE).view(case.shape), drawn)
    x = Source(case.seed).normal(case.shape, case.dtype)
    kept = kernel.forward(x, key, place, case.p, TILE)
    assert torch.equal(kept != 0, (x != 0) & (drawn > case.p) & (case.p < 1))
    near(kept, dropout.reference(x.double(), drawn, case.p), 1)


@given(cases())
def check_dropout(case: Case) -> None:
    holds(dropout, case)


@given(cases())
def check_ranks_share_the_numbers_of_one(case: Case) -> None:
    device = torch.get_default_device()
    whole = tuple(a * b for a, b in zip(case.shape, case.ranks, strict=True))
    places = [
        dropout.place_of(case.shape, whole, case.splits, [torch.tensor(each) for each in at], device)
        for at in product(*map(range, case.ranks))
    ]
    held = torch.cat([(place.rows[:, None] + place.columns).flatten() for place in places])
    assert torch.equal(held.sort().values, torch.arange(prod(whole)))

    key = torch.tensor(case.key)
    one = dropout.numbers(key, dropout.place_of(whole, whole, [], [], device), TILE).flatten()
    drawn = torch.cat([dropout.numbers(key, place, TILE).flatten() for place in places])
    assert torch.equal(drawn, one[held])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uniform > p", "uniform >= p"),
        ("word ^ (word >> 16)", "word ^ (word >> 17)"),
        ("(index >> 32)", "(index >> 31)"),
        ("(word >> 8)", "(word >> 7)"),
        ("tl.load(key + 1)", "tl.load(key)"),
        ("columns - corner", "columns"),
        ("* weight\n", "\n"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(dropout, old, new, tmp_path), cases())
