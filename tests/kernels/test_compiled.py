"""Every kernel with its tiles: compiled for a GPU of each maker, without spills and within its memory.

`make exact` compiles them for every GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from parked_kernels.catalogue import ALL_KERNELS, ALL_TILES

from moaic.runtime.codegen.triton_aot import Binary, ahead
from moaic.runtime.host.gpu_specs import TARGETS, Target
from moaic.runtime.kernels.tiles import Tiling
from moaic.runtime.kernels.triton_launch import Tile, TritonProgram

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""The compiler imports what warns of itself."""


def compiled(program: TritonProgram, target: Target, tile: Tile) -> Binary:
    return ahead(program.function, program.types, program.constants, target, tile.warps)


def fits(kernel: str, target: Target, cut: Tiling, element: str) -> Iterator[str]:
    """What is wrong with a kernel's functions on a GPU."""
    for program in ALL_KERNELS[kernel].programs(element, cut.tile):
        made, name = compiled(program, target, cut.tile), f"{program.function.__name__} of {element} in {cut.tile}"
        if made.spills:
            yield f"{name} spills {made.spills}"
        if made.shared > target.shared:
            yield f"{name} asks for {made.shared} bytes of shared memory, there are {target.shared}"
        if not made.code.startswith(b"\x7fELF"):
            yield f"{name} is no binary"


OF_EACH_MAKER = ("sm_90", "gfx942")


@pytest.mark.parametrize("target", OF_EACH_MAKER)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_compiles(kernel: str, target: str) -> None:
    first, *_ = ALL_TILES[kernel][target]
    assert not list(fits(kernel, TARGETS[target], first, "bf16"))


@pytest.mark.exact
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_every_cut_compiles(kernel: str, target: str) -> None:
    cuts = ALL_TILES[kernel][target]
    elements = ("bf16", "fp16", "fp32")
    wrong = [fault for cut in cuts for element in elements for fault in fits(kernel, TARGETS[target], cut, element)]
    assert not wrong


@pytest.mark.exact
@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_compiles_without_what_is_optional(kernel: str) -> None:
    """Without a residual, a bias, a copy, a cap: what is on in `programs` is switched off, one at a time."""
    tile = ALL_TILES[kernel]["sm_80"][0].tile
    for program in ALL_KERNELS[kernel].programs("bf16", tile):
        for name, value in program.constants.items():
            if isinstance(value, bool | float) and value:
                without = replace(program, constants={**program.constants, name: type(value)(0)})
                assert compiled(without, TARGETS["sm_80"], tile).code


def test_a_spill_is_seen() -> None:
    """The same kernel, cut too large."""
    large = Tiling(Tile(columns=8192, warps=4))
    assert any("spills" in fault for fault in fits("norm", TARGETS["sm_90"], large, "fp32"))
