"""Common subexpressions in a captured function, as text: those that are merged, and those that are not."""

from __future__ import annotations

from dataclasses import replace

from moaic.ir.printer import render
from moaic.ir.verify import load
from moaic.passes.transforms.cse import common_subexpressions_merged

TWINS = """// moai 1

func @step(%x: bf16[8, 32], %w: f8e4m3fn[32, 16], %s: f32[1, 1]) -> (bf16[8, 16], bf16[8, 16], bf16[8, 32]) {
  %a = aten.abs %x : bf16[8, 32]                                           forward
  %b = aten.abs %x : bf16[8, 32]                                           forward
  %c = aten.abs %x : bf16[8, 32]                                           backward
  %d = aten.abs %x : bf16[8, 32]                                           forward
  %p = aten._to_copy %a {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             forward
  %q = aten._to_copy %b {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             forward
  %r = aten._to_copy %c {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             backward
  %y = moai.scaled_mm %p, %w, %s, %s {dtype = "bf16"} : bf16[8, 16]        forward
  %u = aten.clone %a : bf16[8, 32]                                         forward
  %v = aten.clone %b : bf16[8, 32]                                         forward
  %t = aten.mul.Tensor %u, %v : bf16[8, 32]                                forward
  %o = aten._to_copy %t {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             forward
  %g = aten.add.Tensor %o, %q : f8e4m3fn[8, 32]                            forward
  %h = aten.add.Tensor %g, %r : f8e4m3fn[8, 32]                            backward
  %z = moai.scaled_mm %h, %w, %s, %s {dtype = "bf16"} : bf16[8, 16]        backward
  return %y, %z, %d
}
"""
"""Of four equal ops one belongs to a backward and one makes a result."""

ONCE = """// moai 1

func @step(%x: bf16[8, 32], %w: f8e4m3fn[32, 16], %s: f32[1, 1]) -> (bf16[8, 16], bf16[8, 16], bf16[8, 32]) {
  %a = aten.abs %x : bf16[8, 32]                                           forward
  %c = aten.abs %x : bf16[8, 32]                                           backward
  %d = aten.abs %x : bf16[8, 32]                                           forward
  %p = aten._to_copy %a {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             forward
  %r = aten._to_copy %c {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             backward
  %y = moai.scaled_mm %p, %w, %s, %s {dtype = "bf16"} : bf16[8, 16]        forward
  %u = aten.clone %a : bf16[8, 32]                                         forward
  %v = aten.clone %a : bf16[8, 32]                                         forward
  %t = aten.mul.Tensor %u, %v : bf16[8, 32]                                forward
  %o = aten._to_copy %t {dtype = "f8e4m3fn"} : f8e4m3fn[8, 32]             forward
  %g = aten.add.Tensor %o, %p : f8e4m3fn[8, 32]                            forward
  %h = aten.add.Tensor %g, %r : f8e4m3fn[8, 32]                            backward
  %z = moai.scaled_mm %h, %w, %s, %s {dtype = "bf16"} : bf16[8, 16]        backward
  return %y, %z, %d
}
"""

WIDE = """// moai 1

func @step(%x: bf16[8, 32]) -> (bf16[8, 32]) {
  %a = aten.abs %x : bf16[8, 32]                                           forward
  %b = aten.abs %x : bf16[8, 32]                                           forward
  %y = aten.mul.Tensor %a, %b : bf16[8, 32]                                forward
  return %y
}
"""


def _after(text: str) -> str:
    module = load(text)
    return render(replace(module, functions=(common_subexpressions_merged(module.main),)))


def test_equal_ops_of_one_side_are_done_once_but_results_and_clones() -> None:
    assert _after(TWINS) == ONCE


def test_a_function_without_products_of_eight_bit_floats_is_left_as_it_is() -> None:
    assert _after(WIDE) == WIDE
