"""From a planned module to the programs that workers run."""

from __future__ import annotations

from moaic.ir.verify import load
from moaic.passes.lowering.programs import check_programs, lower

NUMBERED = """// moai 1
mesh [dp=2]
func @f(%x: f32[4{dp}]) -> (f32[4]) {
  %y = aten.neg %x : f32[4{dp}]
  %z = moai.all_gather %y {axis = "dp"} : f32[4]
  %w = aten.exp %z : f32[4]
  return %w
}
func @f.0(%x: f32[4]) -> (f32[4]) {
  %y = aten.sin %x : f32[4]
  return %y
}
func @main(%x: f32[4{dp}] input "x") -> (f32[4] output "y") {
  %a = call @f %x : f32[4]
  %b = call @f.0 %a : f32[4]
  return %b
}
"""


def test_a_segment_takes_no_name_that_a_later_function_has() -> None:
    """Functions that an axis needs in two forms are numbered as segments are."""
    programs = lower(load(NUMBERED))
    check_programs(programs)
    assert "f.0" in {function.name for function in programs.joint.functions}
