"""Tile sizes of each kernel by GPU and shape: a table, so that a measurement changes one line of data.

Tests check that no entry spills registers and that each fits into shared memory; beyond that, entries are estimates.
`docs/gpus.md` lists the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moaic.runtime.kernels.triton_launch import Tile


@dataclass(frozen=True, slots=True)
class Tiling:
    """A tile, with the largest last dim that it is used for."""

    tile: Tile
    longest: int = 1 << 31


Cuts = Sequence[Tiling]

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
STREAM: Final[Cuts] = (Tiling(Tile(columns=1024)),)
"""Tiles of elementwise kernels."""

_RUNS: Final[Cuts] = (
    *(Tiling(Tile(rows=1024 // run, columns=run), run) for run in (16, 128)),
    Tiling(Tile(columns=1024)),
)


def by_maker(nvidia: Cuts, amd: Cuts) -> Mapping[str, Cuts]:
    """The tiles of a kernel by target, equal for all GPUs of one vendor."""
    return {"sm_90": nvidia, "sm_80": nvidia, "gfx942": amd, "gfx90a": amd}


TILES: Final[Mapping[str, Mapping[str, Cuts]]] = {
    "norm": by_maker(_NORM_NVIDIA, _NORM_AMD),
    "gated": by_maker(STREAM, STREAM),
    "rotary": by_maker(_HALVES, _HALVES),
    "merge": by_maker(_HEADS, _HEADS),
    "exchange": by_maker(_RUNS, _RUNS),
}
"""The tiles by kernel and target."""


def tile_of(
    kernel: str,
    target: str,
    shape: Sequence[int],
    tiles: Mapping[str, Mapping[str, Cuts]] = TILES,
) -> Tile | None:
    """The first tile for a last dim of this size; None if the table has none."""
    cuts = tiles[kernel].get(target, ())
    return next((cut.tile for cut in cuts if shape[-1] <= cut.longest), None)
