from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moaic.runtime.emulation.triton_interpreter import reachable
from moaic.runtime.kernels.triton_launch import Tile
from parked_kernels import bucket
from tests.kernels.drawn import DTYPES, SEEDS, Source, must_fail, near, shapes, spoiled

TILE = Tile(columns=16)
ONE = torch.tensor(1.0)


@dataclass(frozen=True)
class Case:
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    narrow: torch.dtype
    """The bucket's."""
    scale: float
    seed: int


CASES = st.builds(
    Case,
    st.lists(shapes(), min_size=1, max_size=4).map(tuple),
    DTYPES,
    DTYPES,
    st.sampled_from([1.0, 1 / 3]),
    SEEDS,
)


def holds(kernel: Any, case: Case) -> None:
    source, scale = Source(case.seed), torch.tensor(case.scale)
    tensors = [source.normal(shape, case.dtype).contiguous() for shape in case.shapes]
    chunks = kernel.chunks_of(tensors, TILE)
    # What lies beside the bucket is not touched.
    around = torch.full((chunks.elements + 2 * TILE.columns,), 7.0, dtype=case.narrow)
    packed = around[TILE.columns : TILE.columns + chunks.elements]
    want = torch.empty(chunks.elements, dtype=torch.float64)
    bucket.reference([each.double() for each in tensors], want, scale.double())

    with reachable(tensors):
        kernel.pack(chunks, packed, scale, TILE)
    near(packed, want, 1)
    assert torch.equal(around[: TILE.columns], around[-TILE.columns :])
    assert bool((around[: TILE.columns] == 7).all())

    with reachable(tensors):
        kernel.unpack(chunks, packed, 1 / scale, TILE)
    back: tuple[Tensor, ...] = torch.split(packed.double() / scale.double(), [each.numel() for each in tensors])
    for each, its in zip(tensors, back, strict=True):
        near(each, its.view(each.shape), 1)


@given(CASES)
def check_bucket(case: Case) -> None:
    holds(bucket, case)


def check_what_does_not_fit_is_refused() -> None:
    whole = torch.zeros(4, 6)
    with pytest.raises(ValueError, match="of one type, on one device"):
        bucket.chunks_of([whole, whole.half()], TILE)
    with pytest.raises(ValueError, match="does not lie whole in memory"):
        bucket.chunks_of([whole, whole.T], TILE)
    with pytest.raises(ValueError, match="the bucket is not 24 elements side by side"):
        bucket.pack(bucket.chunks_of([whole], TILE), torch.zeros(23), ONE, TILE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start + at, min", "at, min"),
        ("at * each.itemsize", "at"),
        ("inside = at < tl.load(entry + 2)", "inside = at < tl.load(entry + 2) - 1"),
        ("other=0.0).to(tl.float32) * tl.load(scale)", "other=0.0)"),
        ("tl.load(entry + 1) + at", "tl.load(entry + 1)"),
    ],
)
def check_spoiled(old: str, new: str, tmp_path: Path) -> None:
    must_fail(holds, spoiled(bucket, old, new, tmp_path), CASES)
