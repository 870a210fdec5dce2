"""A user who computes in a type that this machine multiplies slowly is told so, once for each model and type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from moaic.capture.pieces import Piece
from moaic.compile import planning
from moaic.ir.graph import Module
from moaic.ir.parser import parse
from moaic.passes.config import Request
from moaic.passes.perf.numbers import Number
from tests.passes.steps import machine

pytestmark = pytest.mark.usefixtures("no_accelerator")


def step(dtype: str) -> Module:
    return parse(
        f"""// moai 1
func @step(%x: {dtype}[8, 16] input, %w: {dtype}[16, 4] param) -> ({dtype}[8, 4]) {{
  %y = aten.mm %x, %w : {dtype}[8, 4]
  return %y
}}
"""
    )


@pytest.mark.parametrize(
    ("factors", "told"),
    [
        ({}, []),
        ({"bf16": 0.5, "f16": 1.0}, []),
        ({"bf16": 1.5}, ["bf16 take 1.5 x"]),
        ({"bf16": 1.5, "f16": 40.0}, ["bf16 take 1.5 x", "f16 take 40.0 x"]),
    ],
)
def test_slow_types_are_told_once(
    factors: Mapping[str, float],
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usual = machine()
    rates = {f"mm.{dtype}": Number(usual.flops["mm.f32"].value / factor) for dtype, factor in factors.items()}
    slow = replace(usual, flops={**usual.flops, **rates})
    monkeypatch.setattr(planning, "this_machine", lambda: slow)
    piece = Piece()
    for dtype in ("f32", "bf16", "f16", "bf16", "f16"):
        planning.Planning(Request(), piece).plan(step(dtype))
    found = [line for line in caplog.messages if line.startswith("Mixed precision saves no time here: products in ")]
    assert [
        line.removeprefix("Mixed precision saves no time here: products in ").partition(" as")[0] for line in found
    ] == told
