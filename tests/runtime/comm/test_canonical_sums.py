"""Sums over ranks have the same bits however the ranks are grouped: their order is a tree over the index."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.layout import Layout, Mesh
from moaic.ir.types import TensorType
from moaic.runtime.comm.transport import summed
from moaic.runtime.dtypes import DTYPE_NAMES
from moaic.runtime.rank_arrays import COLLECTIVES

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def terms(count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Of very different sizes, so that another order has other bits."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.logspace(-2, 2, 64)[torch.randperm(64, generator=random)]
    rows = [torch.randn(64, generator=random) * scales for _ in range(count)]
    return [row.to(dtype) for row in rows]


def written(names: str) -> str:
    """The sum as brackets: `abcdef` is `(((ab)(cd))(ef))`."""
    if len(names) == 1:
        return names
    half = max(size for size in (1, 2, 4, 8) if size < len(names))
    return f"({written(names[:half])}{written(names[half:])})"


def value(brackets: str, given: dict[str, Tensor]) -> Tensor:
    """What brackets mean."""
    stack: list[Tensor] = []
    for letter in brackets:
        if letter == ")":
            right, left = stack.pop(), stack.pop()
            stack.append(left + right)
        elif letter != "(":
            stack.append(given[letter])
    (found,) = stack
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", range(2, 14))
def test_the_order_is_that_of_the_tree(count: int, dtype: torch.dtype) -> None:
    given, names = terms(count, dtype), "abcdefghijklm"[:count]
    kept = [each.clone() for each in given]
    is_half = dtype in (torch.bfloat16, torch.float16)
    exact = [each.float() for each in given] if is_half else given
    expected = value(written(names), dict(zip(names, exact, strict=True))).to(dtype)
    out = torch.empty_like(given[0])
    assert torch.equal(summed(given), expected)
    assert summed(given, out) is out
    assert torch.equal(out, expected)
    assert all(map(torch.equal, given, kept))


def test_what_is_written_is_what_is_meant() -> None:
    assert written("abcd") == "((ab)(cd))"
    assert written("abcdefg") == "(((ab)(cd))((ef)g))"


def test_the_order_matters() -> None:
    """Else the tests above would hold for any."""
    given = terms(4, torch.float32)
    assert not torch.equal(summed(given), ((given[0] + given[1]) + given[2]) + given[3])


@given(hosts=st.integers(1, 4), local=st.sampled_from([1, 2, 4]), rest=st.integers(0, 3), seed=st.integers(0, 99))
def test_hosts_may_sum_what_they_hold_first(hosts: int, local: int, rest: int, seed: int) -> None:
    """Each of the hosts has a power of two ranks, the last one perhaps fewer."""
    count = hosts * local + min(rest, local - 1)
    given = terms(count, torch.float32, seed)
    blocks = [given[at : at + local] for at in range(0, count, local)]
    roots = [_sum_of(block) for block in blocks]
    assert count < 2 or torch.equal(_sum_of(roots), summed(given))


def _sum_of(block: Sequence[Tensor]) -> Tensor:
    return summed(block) if len(block) > 1 else block[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7, 8])
def test_the_interpreter_sums_as_the_workers_do(count: int, dtype: torch.dtype) -> None:
    given, mesh = terms(count, dtype), Mesh((("dp", count),))
    partial = TensorType(DTYPE_NAMES[dtype], (64,), Layout(partial=("dp",)))
    whole = TensorType(DTYPE_NAMES[dtype], (64,))
    found = COLLECTIVES["moai.all_reduce"](given, partial, whole, "dp", mesh)
    assert all(torch.equal(each, summed(given)) for each in found)
