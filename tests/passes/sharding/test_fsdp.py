"""Sharded parameters: how often each is gathered, and in which type."""

from __future__ import annotations

from collections import Counter

import pytest

from moaic.ir.op_names import ALL_GATHER
from moaic.ir.verify import check_made, load
from moaic.passes.config import Distribute
from moaic.passes.sharding.fsdp import distribute

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
