from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.runtime.kernels.operators import OPERATORS, KernelOperator
from moaic.runtime.kernels.triton_launch import Tile
from tests.kernels.drawn import DTYPES, ROUNDING, SEEDS, Source

TILE = Tile(rows=16, columns=16, programs=2)


@dataclass(frozen=True)
class Case:
    leading: tuple[int, ...]
    width: int
    dtype: torch.dtype
    optional: bool
    """Whether there is what need not be."""
    seed: int


CASES = st.builds(
    Case,
    st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple),
    st.integers(1, 16),
    DTYPES,
    st.booleans(),
    SEEDS,
)


def operands_of(operator: KernelOperator, case: Case) -> list[Any]:
    """By the names of the schema."""
    source = Source(case.seed)
    turns = operator.kernel == "rotary"
    tokens = case.leading
    x = source.normal((2, 3, tokens[-1], 2 * case.width) if turns else (*tokens, case.width), case.dtype)
    angles = (2 if case.optional else 1, 1, *x.shape[-2:])
    named: dict[str, Any] = {
        **dict.fromkeys(("x", "total", "gate"), x),
        **{name: source.normal(x.shape, case.dtype) for name in ("residual", "up")},
        "through": source.normal(x.shape, case.dtype) if case.optional else None,
        "grad": source.normal(x.shape, case.dtype),
        **{name: source.normal(angles, torch.float32) for name in ("cos", "sin")},
        "mean": x.float().mean(-1, keepdim=True),
        "bias": source.normal((case.width,), case.dtype) if case.optional else None,
        "approximate": "tanh" if case.optional else "none",
        "scale": (x.float().square().mean(-1, keepdim=True) + 1e-3).rsqrt(),
        "weight": source.normal((case.width,), case.dtype),
        "eps": 1e-3,
    }
    words = operator.schema.partition("(")[2].partition(")")[0].split(", ")
    return [named[word.rpartition(" ")[2]] for word in words]


def results_of(made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
@given(case=CASES)
def check_both_forms_give_the_same(operator: KernelOperator, case: Case) -> None:
    """In numbers, shapes, types and strides: a graph that was made with one is run with the other."""
    operands = operands_of(operator, case)
    ours, plain = operator.triton(TILE, *operands), results_of(operator.in_plain(*operands))
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        near = 4 * ROUNDING[case.dtype]
        torch.testing.assert_close(one, other, rtol=near, atol=16 * near)
