"""Sharded parameters: how often each is gathered, and in which type."""

from __future__ import annotations

from collections import Counter

import pytest

from moaic.ir.layout import Sharded, is_uneven
from moaic.ir.op_names import ALL_GATHER
from moaic.ir.verify import check_made, load
from moaic.passes.config import Distribute
from moaic.passes.sharding.fsdp import distribute
from tests.passes.models import MODELS, Proof, config

CAST_TWICE = """// moai 1
mesh [dp=2]
func @step(%x: bf16[4{dp}, 4], %w: f32[4, 4] param "w") -> (bf16[4{dp}, 4], f32[4, 4] grad "w") {
  %c = aten._to_copy %w {dtype = "bf16"} : bf16[4, 4] forward
  %y = aten.mm %x, %c : bf16[4{dp}, 4] forward
  %again = aten._to_copy %w {dtype = "bf16"} : bf16[4, 4] backward
  %gx = aten.mm %y, %again : bf16[4{dp}, 4] backward
  %t = aten.permute %x {dims = [1, 0]} : bf16[4, 4{dp}] backward
  %p = aten.mm %t, %gx : bf16[4, 4] +dp backward
  %wide = aten._to_copy %p {dtype = "f32"} : f32[4, 4] +dp backward
  %g = moai.all_reduce %wide {axis = "dp"} : f32[4, 4] backward
  return %gx, %g
}
"""


@pytest.mark.parametrize(
    ("level", "low_precision", "gathers"),
    [
        ("optimizer", False, {}),
        ("step", False, {"f32": 1}),
        ("step", True, {"bf16": 1}),
        ("use", False, {"f32": 2}),
        ("use", True, {"bf16": 2}),
    ],
)
def test_a_parameter_is_gathered_as_often_as_its_level_says(
    level: Distribute, low_precision: bool, gathers: dict[str, int]
) -> None:
    """A backward casts parameters again rather than save what can be made of them: that is no other gather."""
    made = check_made(distribute(load(CAST_TWICE), level, low_precision), "distribute")
    assert Counter(op.results[0].type.dtype for op in made.main.ops if op.name == ALL_GATHER) == gathers


SUMMED = """// moai 1
mesh [mb=2, dp=2, cp=2]
func @step(%x: f32[4, 16{{mb, dp, cp}}], %y: f32[16{{mb, dp, cp}}, 4], %w: f32[4, 4] param "w") -> (
    f32[4, 4] grad "w"
) {{
  %p = aten.mm %x, %y : f32[4, 4] +cp +dp +mb backward
  %m = moai.all_reduce %p {{axis = "mb"}} : f32[4, 4] +cp +dp backward
{sums}
  return %g
}}
"""
WHOLE = """
  %c = moai.all_reduce %m {axis = "cp"} : f32[4, 4] +dp backward
  %g = moai.all_reduce %c {axis = "dp"} : f32[4, 4] backward"""
PARTS = """
  %c = moai.reduce_scatter %m {axis = "cp"} : f32[4, 4{cp}] +dp backward
  %d = moai.all_reduce %c {axis = "dp"} : f32[4, 4{cp}] backward
  %g = moai.all_gather %d {axis = "cp"} : f32[4, 4] backward"""


@pytest.mark.parametrize("sums", [WHOLE, PARTS], ids=["whole", "parts"])
@pytest.mark.parametrize(
    ("level", "order"),
    [
        ("optimizer", ["all_reduce mb", "reduce_scatter dp", "all_reduce cp"]),
        ("use", ["reduce_scatter dp", "all_reduce mb", "all_reduce cp"]),
    ],
)
def test_other_axes_add_up_shards_of_gradients(sums: str, level: Distribute, order: list[str]) -> None:
    """However the sum over the axis is written: in turn with that over `dp`, or around it."""
    made = check_made(distribute(load(SUMMED.format(sums=sums)), level), "distribute").main
    assert made.results[0].type.layout.state("dp") == Sharded(0, 2)
    assert [f"{op.name.removeprefix('moai.')} {op.attrs['axis']}" for op in made.ops if "axis" in op.attrs] == order


def test_a_gradient_that_is_also_read_is_not_sharded() -> None:
    read = SUMMED.format(sums=f"{WHOLE}\n  %n = aten.neg %g : f32[4, 4] backward").replace("return %g", "return %n")
    made = check_made(distribute(load(read), "optimizer"), "distribute").main
    assert [op.name for op in made.ops].count("moai.reduce_scatter") == 0


@pytest.fixture(scope="module")
def narrow() -> Proof:
    """A Llama 16 wide, with rows for three and for five devices: most of its dims do not divide by these."""
    return Proof(MODELS["llama"], rows=30)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=3,distribute_param=optimizer",
        "dp=3,distribute_param=step,tp=2",
        "dp=3,distribute_param=use,micro_batches=2",
        "dp=3,distribute_param=use,pp=2,micro_batches=2,schedule=zero-bubble",
        "dp=5,distribute_param=use",
    ],
)
def test_what_does_not_divide_is_sharded_unevenly(narrow: Proof, plan: str) -> None:
    made = narrow.prove(config(plan)).module
    ranks = made.mesh.size("dp")
    gradients = [made.main.results[index].type for index in made.main.gradients]
    splits = [split for each in gradients if (split := each.layout.split_of("dp")) is not None]
    assert len(splits) == len(gradients)
    assert any(
        is_uneven(each.shape[split.dim], split.stride, ranks) for each, split in zip(gradients, splits, strict=True)
    )
