"""The parked kernels with their tiles, and the list of all kernels for benchmarks and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from moaic.runtime.kernels import tiles
from moaic.runtime.kernels.registry import KERNELS, Kernel
from moaic.runtime.kernels.tiles import STREAM, TILES, Cuts, Tiling, by_maker
from moaic.runtime.kernels.triton_launch import Tile
from parked_kernels import adamw, bucket, dropout


@dataclass(frozen=True, slots=True)
class ParkedKernel:
    """A kernel that nothing calls, and why."""

    kernel: Kernel
    reason: str
    cuts: Mapping[str, Cuts]
    """Its tiles, by target."""


PARKED: Final[Mapping[str, ParkedKernel]] = {
    parked.kernel.name: parked
    for parked in (
        ParkedKernel(
            Kernel(
                "adamw",
                "a step of AdamW over one flat shard, with the gradient's cast, its clipping scale and the "
                "low-precision copy of the parameters",
                "the optimizer's step",
                adamw.update,
                None,
                adamw.reference,
                adamw.programs,
                "elements",
                ((1 << 26,), (1 << 28,)),
            ),
            "PyTorch's own AdamW updates many tensors in one launch",
            by_maker(STREAM, STREAM),
        ),
        ParkedKernel(
            Kernel(
                "dropout",
                "dropout with the numbers of `moai.rand`, the same under every plan; no mask is kept",
                "ops of functions",
                dropout.forward,
                dropout.forward,
                dropout.reference,
                dropout.programs,
                "tokens, width",
                ((4096, 2048), (4096, 4096)),
            ),
            "Inductor computes the random numbers inside the kernels around the dropout",
            by_maker(STREAM, STREAM),
        ),
        ParkedKernel(
            Kernel(
                "bucket",
                "tensors into one flat bucket for a collective, in another type and scaled, and out of it",
                "packing for collectives",
                bucket.pack,
                bucket.unpack,
                bucket.reference,
                bucket.programs,
                "elements",
                ((1 << 24,), (1 << 26,)),
            ),
            "sums over ranks keep the type of their tensors, and PyTorch packs tensors of one type in one launch",
            by_maker((Tiling(Tile(columns=2048)),), (Tiling(Tile(columns=2048)),)),
        ),
    )
}
"""By name."""

ALL_KERNELS: Final[Mapping[str, Kernel]] = {
    **KERNELS,
    **{name: parked.kernel for name, parked in PARKED.items()},
}
"""The kernels of `runtime/kernels`, then the parked ones."""

ALL_TILES: Final[Mapping[str, Mapping[str, Cuts]]] = {
    **TILES,
    **{name: parked.cuts for name, parked in PARKED.items()},
}


def tile_of(kernel: str, target: str, shape: Sequence[int]) -> Tile | None:
    """The tile of any kernel for a shape; None where it is not cut for that."""
    return tiles.tile_of(kernel, target, shape, ALL_TILES)


def table_of(kernel: str) -> str:
    """The file that lists the tiles of a kernel."""
    return "bench/parked_kernels/catalogue.py" if kernel in PARKED else "runtime/kernels/tiles.py"
