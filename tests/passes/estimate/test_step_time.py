from __future__ import annotations

from dataclasses import replace

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.verify import load
from moaic.passes.build import build
from moaic.passes.config import Config
from moaic.passes.estimate.memory import fused_functions
from moaic.passes.estimate.step_time import Prediction, function_seconds, predict, program_seconds
from moaic.passes.perf import machine_text
from moaic.passes.perf.fusion import fuse, op_by_op
from moaic.passes.perf.links import Link, RankGroup
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import MeasureSource, Number, total
from moaic.planner.worker import Compiler
from tests.passes.steps import dense, machine
from tests.runtime.rings import Ring


def predicted(config: Config, where: Machine, rows: int = 8, width: int = 4, hidden: int = 16) -> Prediction:
    plan = build(dense(rows, width, hidden), config)
    return predict(plan, where, function_seconds(where, fused_functions()))


def function(text: str) -> Function:
    return load("// moai 1\n" + text).main


def test_fused_ops_read_and_write_memory_once() -> None:
    fused = fuse(
        function("""func @f(%x: f32[100], %y: f32[100]) -> (f32[100]) {
  %a = aten.mul.Tensor %x, %y : f32[100]
  %b = aten.exp %a : f32[100]
  %c = aten.add.Tensor %b, %x : f32[100]
  return %c
}""")
    )
    (kernel,) = fused.kernels
    assert kernel.nbytes == 3 * 400
    assert fused.transient == 400


def test_ops_that_run_one_by_one_write_each_result_but_views() -> None:
    chain = function("""func @f(%x: f32[100]) -> (f32[10, 10]) {
  %a = aten.exp %x : f32[100]
  %one = aten.full {size = [100], fill_value = 1.0, dtype = "f32"} : f32[100]
  %b = aten.add.Tensor %a, %one : f32[100]
  %c = aten.view %b {size = [10, 10]} : f32[10, 10]
  return %c
}""")
    kernels = op_by_op(chain).kernels
    assert [op.name for kernel in kernels for op in kernel.ops] == ["aten.exp", "aten.full", "aten.add.Tensor"]
    # The sum is made beside both of its operands.
    assert op_by_op(chain).transient == 3 * 400
    assert fuse(chain).transient == 400


def test_a_heavy_op_is_a_kernel_of_its_own_and_parts_those_around_it() -> None:
    fused = fuse(
        function("""func @f(%x: f32[10, 10]) -> (f32[10, 10]) {
  %a = aten.exp %x : f32[10, 10]
  %b = aten.mm %a, %a : f32[10, 10]
  %c = aten.add.Tensor %a, %b : f32[10, 10]
  return %c
}""")
    )
    assert [[op.name for op in kernel.ops] for kernel in fused.kernels] == [
        ["aten.exp"],
        ["aten.mm"],
        ["aten.add.Tensor"],
    ]
    # %a lives until the sum is made, beside %b and %c.
    assert fused.transient == 3 * 400


def test_views_and_constants_cost_nothing() -> None:
    fused = fuse(
        function("""func @f(%x: f32[4, 6]) -> (f32[24], f32[24]) {
  %v = aten.view %x {size = [24]} : f32[24]
  %one = aten.full {size = [24], fill_value = 1.0, dtype = "f32"} : f32[24]
  %y = aten.add.Tensor %v, %one : f32[24]
  return %v, %y
}""")
    )
    (kernel,) = fused.kernels
    assert kernel.nbytes == 2 * 96
    assert fused.results[0] is fused.function.params[0]
    assert fused.transient == 96


def test_a_lookup_reads_only_what_it_returns() -> None:
    fused = fuse(
        function("""func @f(%w: f32[1000, 8], %i: i64[2]) -> (f32[2, 8]) {
  %r = aten.embedding %w, %i : f32[2, 8]
  return %r
}""")
    )
    assert fused.kernels[0].nbytes == 64 + 16 + 64


def test_a_matmul_takes_its_arithmetic() -> None:
    where = machine()
    seconds = predicted(Config(), where, rows=256, width=256, hidden=256).parts
    assert seconds["heavy"].value == pytest.approx(5 * 2 * 256**3 / 1e9)
    assert seconds["heavy"].source is MeasureSource.MEASURED


def test_a_light_step_takes_its_traffic() -> None:
    where = machine()
    light = predicted(Config(), where, rows=64, width=4, hidden=4096).parts["light"].value
    # relu, and its backward beside it: 64 x 4096 float32 read and written a few times, never a matmul's worth.
    assert 2 * 4 * 64 * 4096 / 1e9 <= light <= 10 * 4 * 64 * 4096 / 1e9


def test_two_ranks_halve_the_arithmetic_and_pay_for_sums() -> None:
    where = machine()
    one, two = (predicted(Config(dp=n), where, rows=256, width=256, hidden=256).parts for n in (1, 2))
    assert two["heavy"].value == pytest.approx(one["heavy"].value / 2)
    assert "collective" not in one
    # Loss and two gradients: a millisecond each to begin, and their bytes at one gigabyte per second.
    assert two["collective"].value == pytest.approx(3e-3 + (4 + 2 * 4 * 256 * 256) / 1e9, rel=0.01)


def test_micro_batches_pay_per_instruction() -> None:
    where = machine(overhead=1e-3)
    one, four = (predicted(Config(micro_batches=n), where).parts["overhead"].value for n in (1, 4))
    assert four > 4 * one


def test_sharded_updates_are_made_whole_again() -> None:
    where = machine()
    whole, sharded, resting = (
        predicted(Config(dp=2, distribute_param=level), where, 256, 256, 256).parts["optimizer"].value
        for level in ("none", "optimizer", "step")
    )
    moved = 2 * 256 * 256 * (3 * 4 + 4 * 4) / 1e9
    assert whole == pytest.approx(moved)
    assert sharded == pytest.approx(moved / 2 + 2 * (1e-3 + 4 * 256 * 256 / 1e9))
    assert resting == pytest.approx(moved / 2)


def test_what_a_machine_overlaps_costs_what_is_waited_for() -> None:
    where = machine()
    step, config = dense(512, 256, 256), Config(dp=2, micro_batches=4, distribute_param="use")
    found = [Compiler(step, replace(where, overlaps=overlaps)) for overlaps in (False, True)]
    memory, _ = (compiler.compile(config).memory for compiler in found)
    serial, overlapped = (compiler.cost(config) for compiler in found)
    assert memory is not None
    assert overlapped.parts["heavy"] == serial.parts["heavy"]
    assert 0 < overlapped.parts["collective"].value < serial.parts["collective"].value
    assert overlapped.seconds.value < serial.seconds.value


def test_a_sum_is_as_good_as_its_worst_number() -> None:
    assert total([Number(1.0, MeasureSource.MEASURED), Number(2.0, MeasureSource.INTERPOLATED)]) == Number(
        3.0, MeasureSource.INTERPOLATED
    )
    assert (
        total([Number(1.0, MeasureSource.MEASURED), Number(0.0, MeasureSource.ASSUMED)]).source
        is MeasureSource.MEASURED
    )


def test_the_assumed_optimizer_makes_the_whole_prediction_assumed() -> None:
    assert predicted(Config(), machine()).seconds.source is MeasureSource.ASSUMED


def test_rates_that_nobody_measured_say_so() -> None:
    where = machine()
    assert where.rate("mm", "f32").source is MeasureSource.MEASURED
    assert where.rate("mm", "bf16") == Number(1e9, MeasureSource.ASSUMED)
    assert where.rate("mm", "f64") == Number(0.5e9, MeasureSource.ASSUMED)
    assert where.rate("cheap", "bf16") == Number(1e9, MeasureSource.INTERPOLATED)
    assert where.rate("sdpa_backward", "f32").source is MeasureSource.ASSUMED


def test_collectives_over_more_ranks_are_scaled() -> None:
    where = machine()
    two, four = (where.collective("all_reduce", 1e9, RankGroup(ranks)) for ranks in (2, 4))
    assert two == Number(1.001, MeasureSource.MEASURED)
    assert four.value == pytest.approx(1.501)
    assert four.source is MeasureSource.INTERPOLATED
    assert where.collective("all_to_all", 1e9, RankGroup(2)).source is MeasureSource.ASSUMED


def test_a_machine_is_text_and_back() -> None:
    where = machine()
    assert machine_text.from_text(machine_text.to_text(where)) == where


@pytest.mark.parametrize("text", ["", "{}", '{"workers": 2}', "[]"])
def test_text_that_is_no_machine_is_refused(text: str) -> None:
    with pytest.raises(Diagnostic, match="does not describe a machine"):
        machine_text.from_text(text)


def test_local_shapes_are_what_is_priced() -> None:
    plan = build(dense(rows=8, width=256, hidden=256), Config(tp=2))
    assert plan.programs.joint.mesh == Mesh((("tp", 2),))
    where = machine()
    heavy = predict(plan, where, function_seconds(where, fused_functions())).parts["heavy"].value
    assert heavy <= 5 * 2 * 8 * 256 * 256 / 1e9


def test_a_send_takes_what_its_link_takes_or_copies() -> None:
    plan = build(dense(rows=8, width=256, hidden=256), Config(pp=2, micro_batches=2))
    copied = machine()
    linked = replace(copied, links={**copied.links, "send": Link(Number(1e-3), Number(1e6), 2)})
    seconds = [
        predict(plan, where, function_seconds(where, fused_functions())).parts["send"] for where in (copied, linked)
    ]
    sends = [op for op in plan.programs.joint.main.ops if op.name == SEND]
    nbytes = sum(op.results[0].type.local_nbytes(plan.programs.joint.mesh) for op in sends)
    # The worker that ends last has one end of each.
    assert seconds[1].value == pytest.approx((len(sends) * 1e-3 + nbytes / 1e6) / 2)
    assert seconds[0].value < seconds[1].value


@pytest.mark.parametrize(("striped", "blocks"), [(False, 1.5), (True, 1.0)])
def test_a_ring_takes_its_turns(striped: bool, blocks: float) -> None:
    """The last rank skips half of its own block alone, or of all; each block and gradient is handed on by itself."""
    ring = Ring(2, rows=512, columns=512, causal=True, striped=striped, batch=1, heads=1, width=64, value_width=64)
    where = replace(machine(overhead=1e-4), flops={"mm.f32": Number(1e9), "sdpa.f32": Number(1e9)})
    spent = program_seconds(load(ring.text), where, function_seconds(where, fused_functions()))
    block, row = 256 * 64 * 4, 256 * 4
    added = 3 * (block + row) + 3 * 3 * block
    assert spent["heavy"].value == pytest.approx(((2 + 5) * 256 * 256 * 128 * blocks + added) / 1e9)
    assert spent["collective"].value == pytest.approx((2 + 2 + 4) * (1e-3 + 2 * block / 1e9))
    assert spent["overhead"].value == pytest.approx(2 * 2 * 1e-4)


def test_what_waits_for_a_message_waits_for_all_of_it() -> None:
    """Of one micro-batch nothing is computed beside: activations go down, and gradients come back."""
    plan, slow = build(dense(), Config(pp=2)), replace(machine(), levels=())
    links = {rate: {**slow.links, "send": Link(Number(1e-3), Number(rate), 2)} for rate in (1e6, 1e30)}
    at_once, seconds = (
        predict(plan, where, function_seconds(where, fused_functions())).seconds.value
        for where in (replace(slow, links=links[1e30]), replace(slow, links=links[1e6]))
    )
    main = plan.programs.joint.main
    read = {value for op in main.ops for value in op.inputs()}
    awaited = [op.results[0] for op in main.ops if op.name == SEND and op.results[0] in read]
    assert seconds - at_once >= sum(value.type.local_nbytes(plan.programs.joint.mesh) for value in awaited) / 1e6
