"""Counts of generated kernels replace the estimates of fusion, function by function."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moaic.ir.graph import Function
from moaic.ir.layout import Mesh
from moaic.ir.verify import load
from moaic.passes.build import build
from moaic.passes.config import Config
from moaic.passes.estimate.memory import fused_functions
from moaic.passes.estimate.step_time import function_seconds, predict
from moaic.passes.perf import machine_text
from moaic.passes.perf.links import Link, RankGroup
from moaic.passes.perf.machine import Machine, MadeKernel
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.passes.perf.structural_hash import key_of
from tests.passes.steps import dense, machine

GIGA = 1e9


def function(text: str) -> Function:
    return load("// moai 1\n" + text).main


PRODUCT = """func @f(%x: f32[10, 20], %w: f32[20, 30]) -> (f32[10, 30]) {
  %y = aten.mm %x, %w : f32[10, 30]
  %z = aten.add.Tensor %y, %y {alpha = 1} : f32[10, 30]
  return %z
}"""


def test_functions_that_compute_the_same_have_one_key() -> None:
    renamed = PRODUCT.replace("%x", "%input").replace("@f", "@layer").replace("f32[20, 30])", 'f32[20, 30] param "w")')
    placed = renamed.replace(": f32[10, 30]\n", ': f32[10, 30] at "model.py":7 in "layers.0" forward\n')
    assert key_of(function(placed)) == key_of(function(PRODUCT))


@pytest.mark.parametrize(
    ("old", "new"), [("f32", "bf16"), ("10", "11"), ("alpha = 1", "alpha = 2"), ("%y, %y", "%y, %x0"), ("%z\n", "%y\n")]
)
def test_functions_that_do_not_have_others(old: str, new: str) -> None:
    base = PRODUCT.replace("%w: f32[20, 30]", "%w: f32[20, 30], %x0: f32[10, 30]")
    assert key_of(function(base.replace(old, new))) != key_of(function(base))


def seconds(text: str, where: Machine) -> dict[str, Number]:
    return dict(function_seconds(where, fused_functions())(function(text), Mesh()))


def test_a_function_takes_what_its_kernels_take() -> None:
    product = MadeKernel(1, nbytes=1 * GIGA, flops=5 * GIGA, heavy="f32")
    sums = MadeKernel(3, nbytes=2 * GIGA, flops=1 * GIGA)
    where = replace(machine(), made={key_of(function(PRODUCT)): (product, sums)})
    assert seconds(PRODUCT, where) == {
        "heavy": Number(5.0, MeasureSource.MEASURED),
        "light": Number(6.0, MeasureSource.MEASURED),
    }


def test_other_functions_take_what_fusion_expects() -> None:
    where = replace(machine(), made={"another": (MadeKernel(1, GIGA, GIGA),)})
    assert seconds(PRODUCT, where) == seconds(PRODUCT, machine())


def test_every_launch_is_paid_for() -> None:
    launching = replace(machine(), launch=Number(1e-3))
    assert seconds(PRODUCT, launching)["launch"] == Number(2e-3, MeasureSource.ASSUMED)
    made = replace(launching, made={key_of(function(PRODUCT)): (MadeKernel(3, 1.0, 1.0), MadeKernel(4, 1.0, 1.0))})
    assert seconds(PRODUCT, made)["launch"].value == pytest.approx(7e-3)


def test_a_prediction_says_what_launches_take() -> None:
    where = replace(machine(), launch=Number(1e-3))
    parts = predict(build(dense(), Config()), where, function_seconds(where, fused_functions())).parts
    assert parts["launch"].value >= 3e-3, "three products at least"


def test_a_group_that_is_joined_by_pairs_has_fewer_links() -> None:
    rate = Number(GIGA, MeasureSource.PUBLISHED)
    switched, pairs = (
        replace(machine(), links={"all_gather": Link(Number(0.0), rate, 8, direct)}) for direct in (False, True)
    )
    assert switched.collective("all_gather", GIGA, RankGroup(8)) == pairs.collective("all_gather", GIGA, RankGroup(8))
    two = switched.collective("all_gather", GIGA, RankGroup(2)).value
    assert pairs.collective("all_gather", GIGA, RankGroup(2)).value == pytest.approx(7 * two)


def test_what_was_made_is_text_and_back() -> None:
    made = {"a": (MadeKernel(2, 1.5, 2.0, "bf16"), MadeKernel(1, 3.0, 0.0)), "b": ()}
    link = Link(Number(1e-5), Number(1e9, MeasureSource.PUBLISHED), 8, direct=True)
    where = replace(machine(), launch=Number(4e-6), made=made, links={"all_gather": link})
    assert machine_text.from_text(machine_text.to_text(where)) == where
