from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.runtime.comm import pack
from moaic.runtime.comm.transport import SubAxis
from moaic.runtime.kernels.fused import exchange
from moaic.runtime.kernels.triton_launch import Tile
from tests.kernels.drawn import DTYPES, SEEDS, Source, must_fail, spoiled

SIZES = st.integers(1, 4)
TILES = st.sampled_from([Tile(rows=1, columns=16), Tile(rows=4, columns=4), Tile(rows=8, columns=1)])


@dataclass(frozen=True)
class Case:
    above: tuple[int, ...]
    below: tuple[int, ...]
    outer: int
    count: int
    stride: int
    dtype: torch.dtype
    tile: Tile
    seed: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.above, self.outer * self.count * self.stride, *self.below)


AROUND = st.lists(st.integers(0, 3), max_size=2).map(tuple)
CASES = st.builds(Case, AROUND, AROUND, SIZES, SIZES, SIZES, DTYPES, TILES, SEEDS).filter(
    lambda case: prod(case.shape) <= 600
)


def holds(kernel: Any, case: Case) -> None:
    """Bit by bit, both ways: nothing is computed."""
    dim, x = len(case.above), Source(case.seed).normal(case.shape, case.dtype)
    packed = kernel.pack(x, dim, case.stride, case.count, case.tile)
    assert packed.is_contiguous()
    assert torch.equal(packed, exchange.reference(x, dim, case.stride, case.count))
    # Parts of another order, and as they come from elsewhere: not side by side.
    given_parts = packed.flip(0).repeat_interleave(2, 0)[::2]
    back = kernel.unpack(given_parts, dim, case.stride, case.tile)
    assert back.is_contiguous()
    assert torch.equal(back, exchange.reference_join(given_parts, dim, case.stride))


@given(CASES)
def check_exchange(case: Case) -> None:
    holds(exchange, case)


@given(CASES)
def check_collectives_get_the_same_parts_with_it(case: Case) -> None:
    dim, x = len(case.above), Source(case.seed).normal(case.shape, case.dtype)

    def both_ways(tile: Tile | None) -> tuple[Tensor, Tensor]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pack, "tile_where_it_wins", partial(chosen, tile))
            cut = pack.in_parts(x, SubAxis(dim, case.stride), case.count)
            return cut, pack.put_together(cut, SubAxis(dim, case.stride))

    for one, other in zip(both_ways(case.tile), both_ways(None), strict=True):
        # Of a tensor that holds nothing any strides are right.
        assert one.stride() == other.stride() or not one.numel()
        assert torch.equal(one, other)


def chosen(tile: Tile | None, *asked: Any) -> Tile | None:
    return tile


def check_what_does_not_fall_into_parts_is_refused() -> None:
    tile = Tile(rows=1, columns=16)
    with pytest.raises(ValueError, match="a dim of 6 does not divide into 2 parts of stride 2"):
        exchange.pack(torch.zeros(3, 6), 1, 2, 2, tile)
    with pytest.raises(ValueError, match="a dim of 3 does not divide into runs of 2"):
        exchange.unpack(torch.zeros(2, 3), 0, 2, tile)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("row // outer * x_above", "row // runs * x_above"),
        ("row % outer * tl.num_programs(1) + part", "row % outer + part * outer"),
        ("(column // below).to(tl.int64) * x_dim", "(column // below).to(tl.int64) * 0"),
        ("column % below * x_below", "column % below"),
        ("tl.program_id(0) // pieces * ROWS", "tl.program_id(0) // pieces"),
        ("tl.program_id(0) % pieces * COLUMNS", "tl.program_id(0) % pieces"),
        (
            "(row < runs)[:, None] & (column < length)[None, :]",
            "(row < runs)[:, None] & (column + 1 < length)[None, :]",
        ),
        ("parts.contiguous()", "parts"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(exchange, old, new, tmp_path), CASES)
