"""A step whose operands have layouts already, as text: results take these layouts, with little resharding."""

from __future__ import annotations

import pytest

from moaic.ir.layout import FULLY_REPLICATED, Layout, Mesh, Sharded
from moaic.ir.printer import render
from moaic.ir.verify import load
from moaic.passes.sharding.from_inputs import partition_as_inputs

MESH = Mesh((("dp", 2), ("tp", 1)))

ROWS = FULLY_REPLICATED.with_state("dp", Sharded(0, 4))

STEP = """// moai 1

func @step(%w: f32[8, 4], %g: f32[8, 4], %m: f32[8, 4], %n: f32[8, 4]) -> (f32[8, 4], f32[]) {
  %k = aten.add.Tensor %m, %g : f32[8, 4]
  %u = aten.sub.Tensor %w, %k : f32[8, 4]
  %s = aten.sum %n : f32[]
  return %u, %s
}
"""

ALIKE = """// moai 1
mesh [dp=2]

func @step(%w: f32[8{dp}, 4], %g: f32[8{dp}, 4], %m: f32[8{dp}, 4], %n: f32[8, 4]) -> (f32[8{dp}, 4], f32[]) {
  %k = aten.add.Tensor %m, %g : f32[8{dp}, 4]
  %u = aten.sub.Tensor %w, %k : f32[8{dp}, 4]
  %s = aten.sum %n : f32[]
  return %u, %s
}
"""

MOVED = """// moai 1
mesh [dp=2]

func @step(%w: f32[8{dp}, 4], %g: f32[8, 4], %m: f32[8{dp}, 4], %n: f32[8{dp}, 4]) -> (f32[8{dp}, 4], f32[]) {
  %g_1 = moai.shard %g {axis = "dp"} : f32[8{dp}, 4]
  %k = aten.add.Tensor %m, %g_1 : f32[8{dp}, 4]
  %u = aten.sub.Tensor %w, %k : f32[8{dp}, 4]
  %s = aten.sum %n : f32[] +dp
  %s_1 = moai.all_reduce %s {axis = "dp"} : f32[]
  return %u, %s_1
}
"""


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        pytest.param([ROWS, ROWS, None, None], ALIKE, id="what has no place lies as what it is added to"),
        pytest.param([ROWS, FULLY_REPLICATED, None, ROWS], MOVED, id="whole values are cut, no result is partial"),
    ],
)
def test_operands_stay_where_they_lie(layouts: list[Layout | None], expected: str) -> None:
    assert render(partition_as_inputs(load(STEP), MESH, layouts)) == expected


def test_a_step_on_one_rank_is_left_as_it_is() -> None:
    layouts: list[Layout | None] = [FULLY_REPLICATED] * 4
    assert render(partition_as_inputs(load(STEP), Mesh((("dp", 1), ("tp", 1))), layouts)) == STEP
