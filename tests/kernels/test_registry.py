"""The tables of kernels: measured gains, and tiles."""

from __future__ import annotations

import itertools

import pytest
from parked_kernels.catalogue import ALL_KERNELS, ALL_TILES, PARKED, tile_of

from moaic.runtime.host.gpu_specs import TARGETS
from moaic.runtime.kernels.gains import GAINS, in_words, worth_using
from moaic.runtime.kernels.registry import KERNELS
from moaic.runtime.kernels.tiles import TILES

MEASURED = {"norm": {"sm_90": {(1024, 1024): 0.8, (4096, 4096): 1.3}}}


@pytest.mark.parametrize(
    ("target", "shape", "worth"),
    [
        ("sm_90", (4096, 4096), True),
        ("sm_90", (8192, 5120), True),
        ("sm_90", (8192, 2048), False),
        ("sm_90", (1024, 1024), False),
        ("sm_90", (512, 4096), False),
        ("gfx942", (4096, 4096), False),
    ],
)
def test_worth_is_what_was_measured(target: str, shape: tuple[int, ...], worth: bool) -> None:
    assert worth_using("norm", target, shape, MEASURED) is worth


def test_what_nobody_measured_is_never_used() -> None:
    for kernel in ALL_KERNELS.values():
        if not GAINS.get(kernel.name):
            assert not any(worth_using(kernel.name, target, shape) for target in TARGETS for shape in kernel.shapes)


def test_what_was_measured_to_win_has_a_place() -> None:
    assert {*GAINS} <= {*KERNELS}
    assert all(kernel.place for kernel in KERNELS.values())


@pytest.mark.parametrize("kernel", ALL_KERNELS)
def test_every_shape_has_a_tile_on_every_target(kernel: str) -> None:
    for target in TARGETS:
        for shape in ALL_KERNELS[kernel].shapes:
            assert len(shape) == len(ALL_KERNELS[kernel].dims.split(", "))
            assert tile_of(kernel, target, shape) is not None


@pytest.mark.parametrize("kernel", ALL_TILES)
def test_cuts_are_in_order(kernel: str) -> None:
    """The first that fits is taken, so a later one must be for more."""
    for cuts in ALL_TILES[kernel].values():
        for before, after in itertools.pairwise(cuts):
            assert before.longest < after.longest


def test_a_tile_is_found_by_size() -> None:
    norm = TILES["norm"]["sm_90"]
    assert tile_of("norm", "sm_90", (7, 1024)) == norm[0].tile
    assert tile_of("norm", "sm_90", (7, 1025)) == norm[1].tile
    assert tile_of("norm", "sm_90", (7, 1 << 20)) is None
    assert tile_of("norm", "no such GPU", (7, 7)) is None


def test_the_page_says_what_was_measured() -> None:
    import generate

    assert in_words("norm", "sm_90", MEASURED) == "0.80x at 1024 x 1024, 1.30x at 4096 x 4096"
    assert in_words("norm", "gfx942", MEASURED) == "unmeasured, off by default"
    page = generate.kernels_page()
    for kernel in KERNELS.values():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{kernel.name}` |"))
        assert all(in_words(kernel.name, target) in row for target in TARGETS)
    for parked in PARKED.values():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{parked.kernel.name}` |"))
        assert parked.reason in row
