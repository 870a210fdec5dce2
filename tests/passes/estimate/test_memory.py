from __future__ import annotations

import pytest
import torch

from moaic.ir.graph import Function, Op, Value
from moaic.ir.layout import PARTIAL
from moaic.ir.op_names import ACCUMULATE, RECURRENT_BACKWARD
from moaic.ir.types import TensorType
from moaic.ir.verify import load
from moaic.passes.build import build
from moaic.passes.config import Config
from moaic.passes.estimate.memory import Memory, fused_functions, memory_of, program_peak, split_peak
from moaic.passes.perf.fusion import fuse
from tests.passes.steps import dense
from tests.runtime.rings import Ring

WEIGHTS = 2 * 4 * 16 * 4
"""Bytes of both parameters of the dense step."""


def memory(config: Config, rows: int = 8) -> Memory:
    return memory_of(build(dense(rows), config), fused_functions())


def test_one_device_holds_everything() -> None:
    found = memory(Config())
    assert (found.parameters, found.gradients, found.optimizer) == (WEIGHTS, WEIGHTS, 2 * WEIGHTS)
    assert found.joint > found.parameters + found.gradients + found.optimizer
    assert found.step == 5 * WEIGHTS


@pytest.mark.parametrize(
    ("level", "parameters", "gradients"),
    [("none", 1.0, 1.0), ("optimizer", 1.0, 0.5), ("step", 0.5, 0.5), ("use", 0.5, 0.5)],
)
def test_distribution_halves_what_it_says(level: str, parameters: float, gradients: float) -> None:
    found = memory(Config(dp=2, distribute_param=level))  # pyright: ignore[reportArgumentType]
    assert found.parameters == parameters * WEIGHTS
    assert found.gradients == gradients * WEIGHTS
    assert found.optimizer == 2 * gradients * WEIGHTS


@pytest.mark.parametrize(("level", "whole"), [("none", 2), ("optimizer", 2), ("step", 2), ("use", 0)])
def test_sums_over_micro_batches_are_whole_or_in_parts(level: str, whole: int) -> None:
    plan = build(dense(8), Config(dp=2, micro_batches=2, distribute_param=level))  # pyright: ignore[reportArgumentType]
    sums = [op.results[0].type for op in plan.programs.joint.main.ops if op.name == ACCUMULATE]
    assert sum(len(each.shape) == 2 and each.layout.state("dp") == PARTIAL for each in sums) == whole


def test_tensor_parallelism_shares_parameters_out() -> None:
    assert memory(Config(tp=2)).parameters < WEIGHTS


def test_micro_batches_need_less_at_once_but_not_when_run_apart() -> None:
    one, eight = (memory(Config(micro_batches=n), rows=4096) for n in (1, 8))
    assert eight.joint < one.joint / 2
    assert split_peak(build(dense(4096), Config(micro_batches=8)), fused_functions()) > eight.joint


def test_ranks_need_half_of_what_grows_with_the_batch() -> None:
    one, two = (memory(Config(dp=n), rows=4096) for n in (1, 2))
    assert two.joint == pytest.approx(one.joint / 2, rel=0.1)


def peak(text: str) -> int:
    return program_peak(load("// moai 1\nmesh [dp=2]\n" + text), fused_functions())


INCREMENT = """func @more(%x: f32[100]) -> (f32[100]) {
  %y = aten.add.Scalar %x {other = 1} : f32[100]
  return %y
}
"""


def test_a_value_dies_with_its_last_reader() -> None:
    text = """func @main(%x: f32[100]) -> (f32[100]) {
  %a = call @more %x : f32[100]
  %b = call @more %a : f32[100]
  %c = call @more %b : f32[100]
  return %c
}
"""
    assert peak(INCREMENT + text) == 3 * 400


def test_results_are_held_to_the_end() -> None:
    text = """func @main(%x: f32[100]) -> (f32[100], f32[100], f32[100]) {
  %a = call @more %x : f32[100]
  %b = call @more %a : f32[100]
  %c = call @more %b : f32[100]
  return %a, %b, %c
}
"""
    assert peak(INCREMENT + text) == 4 * 400


def test_a_sum_is_added_to_in_place() -> None:
    text = """func @main(%x: f32[100]) -> (f32[100]) {
  %a = call @more %x : f32[100]
  %b = call @more %x : f32[100]
  %s = moai.accumulate %a, %b : f32[100]
  %c = call @more %x : f32[100]
  %t = moai.accumulate %s, %c : f32[100]
  return %t
}
"""
    assert peak(INCREMENT + text) == 3 * 400


def test_a_gather_holds_part_and_whole() -> None:
    text = """func @main(%x: f32[100{dp}]) -> (f32[100]) {
  %a = moai.all_gather %x {axis = "dp"} : f32[100]
  return %a
}
"""
    assert peak(text) == 200 + 400


def test_results_that_are_views_of_operands_take_nothing() -> None:
    text = """func @look(%x: f32[100]) -> (f32[10, 10]) {
  %y = aten.view %x {size = [10, 10]} : f32[10, 10]
  return %y
}
func @main(%x: f32[100]) -> (f32[10, 10]) {
  %a = call @look %x : f32[10, 10]
  return %a
}
"""
    assert peak(text) == 400


@pytest.mark.parametrize(("ranks", "blocks"), [(2, 1), (4, 2)])
def test_a_ring_holds_few_blocks_at_a_time(ranks: int, blocks: int) -> None:
    """Never all keys; in the backward most: operands, blocks at hand and to come, their gradients on three ways."""
    ring = Ring(ranks, rows=8 * ranks, columns=8 * ranks, batch=1, heads=1, width=16, value_width=16)
    part, stats = 8 * 16 * 4, 8 * 4
    assert program_peak(load(ring.text), fused_functions()) == (4 + 1 + 2 * blocks + 2 + 3 * 2) * part + stats


@pytest.mark.parametrize(("mode", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1)])
def test_the_backward_of_recurrent_layers_holds_what_autograd_saves(mode: str, gates: int) -> None:
    """Within a tenth of what PyTorch saves of the layer."""
    time, rows, width = 50, 16, 64
    x = torch.randn(time, rows, width)
    states = [torch.zeros(1, rows, width) for _ in range(1 + (mode == "lstm"))]
    params = [torch.randn(gates * width, width, requires_grad=True) for _ in range(2)]
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer = getattr(torch, mode)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = layer(x, states if mode == "lstm" else states[0], params, False, 1, 0.0, True, False, False)
    for each in (x, *params):
        saved.pop(each.untyped_storage().data_ptr(), None)
    del kept
    operands = [Value(TensorType("f32", tuple(each.shape))) for each in (x, *states, *params)]
    lists = (tuple(operands[1 : 1 + len(states)]), tuple(operands[1 + len(states) :]))
    grads = (Value(TensorType("f32", (time, rows, width))), *(None for _ in states))
    results = tuple(Value(each.type) for each in operands[-2:])
    attrs = {"mode": mode, "batch_sizes": (), "wanted": (*(False for _ in operands[2:]), True, True)}
    op = Op(RECURRENT_BACKWARD, (None, grads, operands[0], *lists), results, attrs)
    function = Function("step", (grads[0], *operands), (op,), results)
    beside = fuse(function).transient - sum(each.nbytes for each in params)
    assert beside == pytest.approx(sum(saved.values()), rel=0.1)


@pytest.mark.parametrize(("rows", "copied"), [(100, 0), (99, 100)])
def test_a_sum_into_uneven_shards_needs_a_copy_with_padding(rows: int, copied: int) -> None:
    text = f"""func @main(%x: f32[{rows}] +dp) -> (f32[{rows}{{dp:50}}]) {{
  %y = moai.reduce_scatter %x {{axis = "dp"}} : f32[{rows}{{dp:50}}]
  return %y
}}
"""
    assert peak(text) == 4 * (rows + 50 + copied)
