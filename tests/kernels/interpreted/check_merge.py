from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.ir.graph import Op
from moaic.runtime.kernels.fused import merge
from moaic.runtime.kernels.triton_launch import Tile
from moaic.runtime.worker import ring_attention
from moaic.runtime.worker.ring_attention import Total, Turn
from tests.kernels.drawn import DTYPES, ROUNDING, SEEDS, Source, must_fail, near, spoiled

TILE = Tile(rows=4, columns=32)


@dataclass(frozen=True)
class Case:
    """Attention with keys in blocks, each token seeing those of no later place."""

    batch: int
    heads: int
    tokens: int
    width: int
    blocks: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    swapped: bool
    """Whether parts come as [B, S, H, D], as attention kernels write them."""
    seed: int


CASES = st.builds(
    Case,
    st.sampled_from([0, 1, 2]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 4, 9]),
    st.sampled_from([1, 16, 27]),
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    DTYPES,
    st.sampled_from([1.0, 40.0]),
    st.booleans(),
    SEEDS,
)


def part(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over one block of keys, in float64."""
    logsumexp = scores.logsumexp(-1)
    finite = torch.where(logsumexp == -torch.inf, 0.0, logsumexp)
    return (scores - finite.unsqueeze(-1)).exp() @ values, logsumexp


def holds(kernel: Any, case: Case) -> None:
    source, leading, keys = Source(case.seed), (case.batch, case.heads), sum(case.blocks)
    scores = case.scale * source.normal((*leading, case.tokens, keys), torch.float32).double()
    # Keys in reverse: the first rows see nothing until the last block, and of some keys nothing at all.
    hidden = torch.arange(keys).flip(0) > torch.arange(case.tokens)[:, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    values = source.normal((*leading, keys, case.width), torch.float32).double()
    out = torch.zeros(*leading, case.tokens, case.width)
    weight, largest = torch.zeros(out.shape[:-1]), torch.full(out.shape[:-1], -torch.inf)
    seen: tuple[Tensor, ...] = torch.split(scores, list(case.blocks), -1)
    theirs: tuple[Tensor, ...] = torch.split(values, list(case.blocks), -2)
    for some, of in zip(seen, theirs, strict=True):
        more, its = part(some, of)
        given_out = more.to(case.dtype)
        if case.swapped:
            given_out = given_out.transpose(1, 2).contiguous().transpose(1, 2)
        wide = out.double(), weight.double(), largest.double()
        merge.reference(*wide, given_out.double(), its.float().double())
        kernel.merge(out, weight, largest, given_out, its.float(), TILE)
        for got, exact in zip((out, weight, largest), wide, strict=True):
            near(got, exact, 8, 2e-6)
    sees = weight > 0
    divisor = torch.where(sees, weight, 1.0)
    out, logsumexp = out / divisor.unsqueeze(-1), torch.where(sees, largest + divisor.log(), -torch.inf)
    want, whole = part(scores, values)
    # Logarithms in float32 are off by their last place, which weights get as a factor; parts were rounded.
    slack = len(case.blocks) * 4e-6 * (1 + case.scale) + 2 * ROUNDING[case.dtype]
    near(out, want, 4, slack * float(values.abs().max()) if values.numel() else 0.0)
    near(logsumexp, whole, 8, 1e-5)


@given(CASES)
def check_merge(case: Case) -> None:
    holds(merge, case)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("tl.exp(b - finite)", "tl.exp(a - finite)"),
        ('tl.where(larger == float("-inf"), 0.0, larger)', "larger"),
        ("* share[:, None]", ""),
        ("* kept + share", "+ share"),
        ("tl.store(largest + so_far, larger", "tl.store(largest + so_far, b"),
        ("head * more_head", "head * more_row"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(merge, old, new, tmp_path), CASES)


def chosen(tile: Tile | None, kernel: str, tensor: Tensor) -> Tile | None:
    return tile


@given(CASES)
def check_the_total_of_a_ring_is_the_same_with_it(case: Case) -> None:
    """Also where the first rows see nothing of a block, and are left out."""
    source, shape = Source(case.seed), (case.batch, case.heads, case.tokens, case.width)
    first, more = (source.normal(shape, case.dtype) for _ in range(2))
    logs = [case.scale * source.normal(shape[:-1], torch.float32) for _ in range(2)]
    turn = Turn(Op("moai.sdpa"), torch.device("cpu"), None, skipped=int(case.tokens > 1))
    totals = [Total.of(first, logs[0], logs[0]) for _ in range(2)]
    for total, tile in zip(totals, (None, TILE), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ring_attention, "tile_where_it_wins", partial(chosen, tile))
            total.add(turn, turn.rows(more), turn.rows(logs[1]))
    for one, other in zip(*(total.finished(torch.float32) for total in totals), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
