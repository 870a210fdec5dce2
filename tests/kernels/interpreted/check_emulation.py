"""What the emulation of a GPU adds to Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from moaic.runtime.emulation.triton_interpreter import LAUNCHES
from moaic.runtime.kernels.triton_launch import Tile, launch

library: Any = libdevice


@triton.jit
def copied(source: tl.tensor, target: tl.tensor, n: tl.tensor, size: tl.constexpr, masked: tl.constexpr):
    at = tl.program_id(0) * size + tl.arange(0, size)
    if masked:
        tl.store(target + at, tl.load(source + at, at < n), at < n)
    else:
        tl.store(target + at, tl.load(source + at), at < n)


@triton.jit
def scattered(source: tl.tensor, target: tl.tensor, rows: tl.tensor, height: tl.constexpr, columns: tl.constexpr):
    at = tl.arange(0, height)[:, None]
    column = tl.arange(0, columns)[None, :]
    tl.atomic_add(target + column + 0 * at, tl.load(source + at * columns + column), at < rows)


@triton.jit
def folded(source: tl.tensor, target: tl.tensor, n: tl.tensor, size: tl.constexpr):
    at = tl.arange(0, size)
    x = tl.load(source + at, at < n)
    tl.store(target + at, library.erf(x) + library.pow(x, 2.0), at < n)


@triton.jit
def multiplied(a: tl.tensor, b: tl.tensor, out: tl.tensor, size: tl.constexpr):
    row, column = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    at = row * size + column
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def narrowed(source: tl.tensor, target: Any, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@triton.jit
def added(a: tl.tensor, b: tl.tensor, out: tl.tensor, size: tl.constexpr):
    at = tl.arange(0, size)
    x, y = tl.load(a + at), tl.load(b + at)
    tl.store(out + at, tl.where(x > y, x + y, x * y - y))


def check_a_load_past_the_end_is_found() -> None:
    source, target = torch.randn(10), torch.zeros(10)
    launch(copied, (1,), Tile(), source, target, 10, size=16, masked=True)
    assert torch.equal(source, target)
    with pytest.raises(Exception, match="copied: it reads 6 elements outside of its operands"):
        launch(copied, (1,), Tile(), source, target, 10, size=16, masked=False)


def check_a_store_past_the_end_is_found() -> None:
    with pytest.raises(Exception, match="copied: it writes 2 elements outside"):
        launch(copied, (1,), Tile(), torch.randn(12), torch.zeros(10), 12, size=16, masked=True)


def check_additions_with_a_mask_of_fewer_elements() -> None:
    source, target = torch.randn(8, 4), torch.zeros(4)
    launch(scattered, (1,), Tile(), source, target, 5, height=8, columns=4)
    torch.testing.assert_close(target, source[:5].sum(0))


def check_functions_of_device_libraries() -> None:
    source, target = torch.randn(10), torch.zeros(10)
    launch(folded, (1,), Tile(), source, target, 10, size=16)
    torch.testing.assert_close(target, torch.erf(source) + source**2)


def check_products_of_bfloat16() -> None:
    a, b = (torch.randn(16, 16).bfloat16() for _ in range(2))
    out = torch.zeros(16, 16)
    launch(multiplied, (1,), Tile(), a, b, out, size=16)
    torch.testing.assert_close(out, a.float() @ b.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
def check_casts_round_to_nearest(dtype: torch.dtype) -> None:
    wide, narrow = torch.randn(1024), torch.zeros(1024, dtype=dtype)
    launch(narrowed, (1,), Tile(), wide, narrow, size=1024)
    assert torch.equal(narrow.float(), wide.to(dtype).float())
    launch(narrowed, (1,), Tile(), narrow, wide, size=1024)
    assert torch.equal(narrow.float(), wide)


def check_arithmetic_of_bfloat16() -> None:
    a, b = (torch.randn(256).bfloat16() for _ in range(2))
    out = torch.zeros_like(a)
    launch(added, (1,), Tile(), a, b, out, size=256)
    assert torch.equal(out, torch.where(a > b, a + b, a * b - b))


@triton.jit
def reduced(source: tl.tensor, target: tl.tensor, size: tl.constexpr):
    values = tl.load(source + tl.arange(0, size))
    tl.store(target, tl.sum(values, 0))
    tl.store(target + 1, tl.max(values, 0))


@triton.jit
def collected(source: tl.tensor, places: tl.tensor, target: tl.tensor, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.atomic_add(target + tl.load(places + at), tl.load(source + at))


@triton.jit
def looked_up(table: tl.tensor, places: tl.tensor, target: tl.tensor, rows: tl.tensor, size: tl.constexpr):
    at = tl.arange(0, size)
    place = tl.load(places + at)
    tl.device_assert((place >= 0) & (place < rows), "index out of bounds: 0 <= place < 4")
    tl.store(target + at, tl.load(table + place))


@triton.jit
def claimed(target: tl.tensor, offset: tl.tensor):
    tl.atomic_cas(target + offset, 0, 1)


@triton.jit
def inverted(source: tl.tensor, target: tl.tensor, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(target + at, ~tl.load(source + at))


def check_reductions_of_bfloat16() -> None:
    source, target = torch.randn(64).bfloat16(), torch.zeros(2).bfloat16()
    launch(reduced, (1,), Tile(), source, target, size=64)
    torch.testing.assert_close(target, torch.stack([source.float().sum().bfloat16(), source.max()]))


def check_atomic_additions_of_bfloat16() -> None:
    source, target = torch.ones(8).bfloat16(), torch.zeros(3).bfloat16()
    launch(collected, (1,), Tile(), source, torch.tensor([0, 2, 0, 0, 1, 2, 0, 2]), target, size=8)
    assert target.tolist() == [4, 1, 3]


def check_an_assertion_about_an_index() -> None:
    table, target = torch.arange(8.0), torch.zeros(2)
    launch(looked_up, (1,), Tile(), table, torch.tensor([3, 1]), target, 4, size=2)
    assert target.tolist() == [3, 1]
    with pytest.raises(RuntimeError, match="looked_up: index out of bounds: 0 <= place < 4"):
        launch(looked_up, (1,), Tile(), table, torch.tensor([3, 5]), target, 4, size=2)


def check_a_view_is_an_operand_by_itself() -> None:
    whole, source = torch.zeros(64), torch.ones(16)
    launch(copied, (1,), Tile(), source, whole[:16], 16, size=16, masked=True)
    with pytest.raises(RuntimeError, match="it writes 6 elements outside"):
        launch(copied, (1,), Tile(), source, whole[:10], 16, size=16, masked=True)
    claims = torch.zeros(4, dtype=torch.int32)
    launch(claimed, (1,), Tile(), claims, 3)
    with pytest.raises(RuntimeError, match="it writes 1 elements outside"):
        launch(claimed, (1,), Tile(), claims, 16)


def check_bits_of_unsigned_numbers() -> None:
    source, target = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8)
    launch(inverted, (1,), Tile(), source, target, size=16)
    assert torch.equal(target, ~source)


def check_launches_are_counted_by_name() -> None:
    x, before = torch.zeros(4), LAUNCHES["copied"]
    launch(copied, (1,), Tile(), x, x.clone(), 4, size=4, masked=True)
    assert LAUNCHES["copied"] == before + 1
