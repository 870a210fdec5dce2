"""How each kernel is cut, by GPU and shape: a table, so that what a GPU teaches is one line of data.

No entry has been timed on a GPU yet. Each spills no register and fits into shared memory, which the tests hold; beyond
that it is judgment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from moaic.runtime.kernels.launch import Tile


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile, and what it is for: the longest last dim, and the widest element in bits."""

    tile: Tile
    longest: int = 1 << 31
    bits: int = 32


Cuts = Sequence[Tiling]

_LOSS_NVIDIA: Final[Cuts] = (
    Tiling(Tile(rows=64, columns=128, inner=64, warps=8, stages=3, programs=8), bits=16),
    Tiling(Tile(rows=64, columns=64, inner=32, warps=8, stages=2, programs=8)),
)
_LOSS_AMD: Final[Cuts] = (
    Tiling(Tile(rows=64, columns=128, inner=32, warps=8, stages=2, programs=8), bits=16),
    Tiling(Tile(rows=64, columns=64, inner=32, warps=8, stages=2, programs=8)),
)
_NORM_NVIDIA: Final[Cuts] = (
    Tiling(Tile(columns=1024, warps=2, programs=1056), 1024),
    Tiling(Tile(columns=2048, warps=4, programs=528), 2048),
    Tiling(Tile(columns=4096, warps=8, programs=264), 4096),
    Tiling(Tile(columns=8192, warps=16, programs=132), 8192),
)
_NORM_AMD: Final[Cuts] = (
    Tiling(Tile(columns=1024, warps=4, programs=608), 1024),
    Tiling(Tile(columns=2048, warps=4, programs=608), 2048),
    Tiling(Tile(columns=4096, warps=8, programs=304), 4096),
    Tiling(Tile(columns=8192, warps=16, programs=304), 8192),
    Tiling(Tile(columns=16384, warps=16, programs=304), 16384),
)
_HEADS: Final[Cuts] = tuple(Tiling(Tile(rows=4096 // width, columns=width), width) for width in (64, 128, 256))
_HALVES: Final[Cuts] = tuple(Tiling(Tile(rows=1024 // half, columns=half), 2 * half) for half in (32, 64, 128))
_STREAM: Final[Cuts] = (Tiling(Tile(columns=1024)),)
"""Of what reads each element once and needs no neighbor."""

_RUNS: Final[Cuts] = (
    *(Tiling(Tile(rows=1024 // run, columns=run), run) for run in (16, 128)),
    Tiling(Tile(columns=1024)),
)


def _by_maker(nvidia: Cuts, amd: Cuts) -> Mapping[str, Cuts]:
    return {"sm_90": nvidia, "sm_80": nvidia, "gfx942": amd, "gfx90a": amd}


TILES: Final[Mapping[str, Mapping[str, Cuts]]] = {
    "linear_cross_entropy": _by_maker(_LOSS_NVIDIA, _LOSS_AMD),
    "adamw": _by_maker(_STREAM, _STREAM),
    "norm": _by_maker(_NORM_NVIDIA, _NORM_AMD),
    "bucket": _by_maker((Tiling(Tile(columns=2048)),), (Tiling(Tile(columns=2048)),)),
    "gated": _by_maker(_STREAM, _STREAM),
    "rotary": _by_maker(_HALVES, _HALVES),
    "dropout": _by_maker(_STREAM, _STREAM),
    "merge": _by_maker(_HEADS, _HEADS),
    "exchange": _by_maker(_RUNS, _RUNS),
}
"""By kernel and target."""


def tile_of(kernel: str, target: str, shape: Sequence[int], element: torch.dtype) -> Tile | None:
    """The first tile that is for a last dim and an element of these sizes; None where there is none."""
    bits = 8 * element.itemsize
    cuts = TILES[kernel].get(target, ())
    return next((cut.tile for cut in cuts if shape[-1] <= cut.longest and bits <= cut.bits), None)
