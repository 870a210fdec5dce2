"""Accumulation of gradients inside functions: the rewritten program, its exceptions, and its cost."""

from __future__ import annotations

import pytest
import torch

from moaic.ir.accumulation import taken_over
from moaic.ir.graph import Function, Module
from moaic.ir.op_names import ACCUMULATE, ADD_TO
from moaic.ir.verify import load, verify
from moaic.passes.build import build
from moaic.passes.config import Config
from moaic.passes.estimate.memory import fused_functions, program_peak
from moaic.passes.lowering.grad_accumulation import added_inside
from moaic.passes.perf.fusion import fuse
from moaic.runtime.interpreter import run_ranks
from tests.passes.steps import dense

TWO_PARTS = """// moai 1
func @part(%x: T[4, 4]) -> (T[4, 4], T[4]) {
  %t = aten.permute %x {dims = [1, 0]} : T[4, 4]
  %p = aten.mm %t, %x : T[4, 4]
  %q = aten.sum.dim_IntList %x {dim = [0]} : T[4]
  return %p, %q
}
func @main(%x: T[4, 4] input "x", %y: T[4, 4] input "y") -> (T[4, 4], T[4]) {
  %p0, %q0 = call @part %x : T[4, 4], T[4]
  %s0 = moai.accumulate _, %p0 : f32[4, 4]
  %t0 = moai.accumulate _, %q0 : f32[4]
  %p1, %q1 = call @part %y : T[4, 4], T[4]
  %s1 = moai.accumulate %s0, %p1 : T[4, 4]
  %t1 = moai.accumulate %t0, %q1 : T[4]
  return %s1, %t1
}
"""


def changed(text: str) -> Module:
    module = added_inside(load(text), {}).program
    verify(module)
    return module


def names(function: Function) -> list[str]:
    return [op.name for op in function.ops]


def values(module: Module) -> list[torch.Tensor]:
    types = [param.type for param in module.main.params]
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if types[0].dtype == "bf16" else torch.float32
    return run_ranks(module, [torch.randn(kind.shape, generator=generator).to(dtype) for kind in types])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_functions_take_the_sums_so_far_and_give_the_next(dtype: str) -> None:
    text = TWO_PARTS.replace("T", dtype)
    module = changed(text)
    part, main = module.functions
    assert [param.type.dtype for param in part.params] == [dtype, "f32", "f32"]
    assert names(part) == ["aten.permute", "aten.mm", ADD_TO, "aten.sum.dim_IntList", ADD_TO]
    assert len(taken_over(part)) == 2
    # Two sums begin at nothing; bfloat16 ones also end narrower than they were.
    ends = [] if dtype == "f32" else [ACCUMULATE] * 2
    assert names(main) == [ACCUMULATE, ACCUMULATE, "call", "call", *ends]
    for before, after in zip(values(load(text)), values(module), strict=True):
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %s1, %t1", "return %s1, %q0"),
        ("%t1 = moai.accumulate %t0, %q1", "%t1 = moai.accumulate %t0, %t0"),
        (
            "%t1 = moai.accumulate %t0, %q1 : f32[4]",
            "%t2 = call @next %q1 : f32[4]\n  %t1 = moai.accumulate %t0, %t2 : f32[4]",
        ),
    ],
)
def test_a_part_that_one_call_gives_to_others_is_added_outside(old: str, new: str) -> None:
    helper = "func @next(%x: f32[4]) -> (f32[4]) { %y = aten.neg %x : f32[4] return %y }\nfunc @main"
    text = TWO_PARTS.replace("T", "f32").replace("func @main", helper).replace(old, new)
    module = changed(text)
    assert names(module.function("part")).count(ADD_TO) == 1
    for before, after in zip(values(load(text)), values(module), strict=True):
        assert torch.equal(before, after)


def test_a_sum_that_stands_below_the_call_is_added_outside() -> None:
    late = "  %p1, %q1 = call @part %y : f32[4, 4], f32[4]\n"
    text = TWO_PARTS.replace("T", "f32").replace(late, "").replace("  %s0 =", f"{late}  %s0 =")
    assert ADD_TO not in names(changed(text).function("part"))


def test_every_gradient_begins_once_at_nothing() -> None:
    programs = build(dense(), Config(micro_batches=4)).programs
    assert programs.backward is not None
    assert names(programs.backward.main).count(ACCUMULATE) == 2
    assert sum(names(function).count(ADD_TO) for function in programs.backward.functions) == 2


def test_a_matmul_adds_without_writing_the_part() -> None:
    fused = fuse(changed(TWO_PARTS.replace("T", "f32")).function("part"))
    matmul = next(kernel for kernel in fused.kernels if kernel.heavy is not None)
    assert [op.name for op in matmul.ops] == ["aten.mm", ADD_TO]
    # It reads its operand and the sum, and writes the sum.
    assert matmul.nbytes == 3 * 64
    # The sum over rows needs no room either: it is added in the pass that makes it.
    assert fused.transient == 0


def test_what_is_added_inside_takes_no_memory_of_its_own() -> None:
    text = TWO_PARTS.replace("T", "f32").replace("4, 4", "400, 400").replace("[4]", "[400]")
    outside, inside = (program_peak(module, fused_functions()) for module in (load(text), changed(text)))
    assert inside == outside - 4 * 400 * 400 - 4 * 400
