"""Pipelines: stage boundaries, owners of values and ops, and programs that give the values of the graph."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from moaic.check.proof import CapturedStep as Given
from moaic.check.proof import in_halves, in_one
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Value
from moaic.ir.op_names import SEND
from moaic.ir.printer import render
from moaic.ir.verify import load, verify
from moaic.passes.build import build
from moaic.passes.config import Config
from moaic.passes.estimate.memory import fused_functions, program_peak
from moaic.passes.estimate.simulate import simulate
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import lower
from moaic.passes.pipeline.balanced_partition import SLACK, balanced_partition
from moaic.planner.candidates import candidates
from moaic.planner.request import parse_request
from moaic.runtime.interpreter import run_function
from tests.passes.models import Proof
from tests.passes.steps import dense


def tied(rows: int = 8, width: int = 6) -> Module:
    """Three linear layers, the first and the last with one weight; the loss is the sum of the outputs."""
    r, w = rows, width
    return load(f"""// moai 1
func @step(%x: f64[{r}, {w}] input "x", %a: f64[{w}, {w}] param "a", %b: f64[{w}, {w}] param "b")
    -> (f64[] output "loss", f64[{w}, {w}] grad "a", f64[{w}, {w}] grad "b") {{
  %u = aten.mm %x, %a : f64[{r}, {w}] in "first" forward
  %v = aten.mm %u, %b : f64[{r}, {w}] in "second" forward
  %y = aten.mm %v, %a : f64[{r}, {w}] in "third" forward
  %loss = aten.sum %y : f64[] in "loss" forward
  %one = aten.full {{size = [{r}, {w}], fill_value = 1.0, dtype = "f64"}} : f64[{r}, {w}] in "loss" backward
  %vt = aten.permute %v {{dims = [1, 0]}} : f64[{w}, {r}] in "third" backward
  %ga2 = aten.mm %vt, %one : f64[{w}, {w}] in "third" backward
  %at = aten.permute %a {{dims = [1, 0]}} : f64[{w}, {w}] in "third" backward
  %gv = aten.mm %one, %at : f64[{r}, {w}] in "third" backward
  %ut = aten.permute %u {{dims = [1, 0]}} : f64[{w}, {r}] in "second" backward
  %gb = aten.mm %ut, %gv : f64[{w}, {w}] in "second" backward
  %bt = aten.permute %b {{dims = [1, 0]}} : f64[{w}, {w}] in "second" backward
  %gu = aten.mm %gv, %bt : f64[{r}, {w}] in "second" backward
  %xt = aten.permute %x {{dims = [1, 0]}} : f64[{w}, {r}] in "first" backward
  %ga1 = aten.mm %xt, %gu : f64[{w}, {w}] in "first" backward
  %ga = aten.add.Tensor %ga1, %ga2 : f64[{w}, {w}] backward
  return %loss, %ga, %gb
}}
""")


def inputs(step: Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    types = {"f32": torch.float32, "f64": torch.float64}
    made = (torch.randn(p.type.shape, dtype=torch.float64, generator=generator) for p in step.main.params)
    return [tensor.to(types[p.type.dtype]) for tensor, p in zip(made, step.main.params, strict=True)]


def assert_computes(step: Module, plan: Plan) -> None:
    """The joint program and both halves give what the graph says."""
    given, programs = Given(step, tuple(inputs(step))), plan.programs
    wanted = run_function(step, step.main.name, given.inputs)
    for found in (in_one(given, programs), in_halves(given, programs)):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert programs.backward is not None
    for program in (programs.joint, programs.forward, programs.backward):
        verify(program)


CONFIGS = [
    Config(pp=2),
    Config(pp=2, micro_batches=2),
    Config(pp=2, micro_batches=4, schedule="gpipe"),
    Config(pp=2, micro_batches=4, schedule="zero-bubble"),
    Config(pp=3, micro_batches=4),
    Config(pp=2, dp=2, micro_batches=2, distribute_param="use"),
    Config(pp=2, micro_batches=2, schedule="F0.1 F0.0 B0.1 B0.0 / F1.1 F1.0 B1.1 B1.0"),
]


CASES = [(make, config) for config in CONFIGS for make in (dense, tied) if make is tied or config.pp == 2]


@pytest.mark.parametrize(("make", "config"), CASES, ids=lambda case: getattr(case, "__name__", str(case)))
def test_a_pipeline_computes_the_graph(make: Callable[[], Module], config: Config) -> None:
    step = make()
    assert_computes(step, build(step, config))


def test_a_weight_that_is_normalised_is_gathered_for_its_gradient_anew() -> None:
    """Its gradient needs the sum over all micro-batches, and then nothing of any of them."""
    proof = Proof(Normalised, lambda _, rows: {"x": torch.randn(rows, 6)})
    proof.prove(Config(pp=2, dp=2, micro_batches=2, distribute_param="use"))


class Normalised(nn.Module):
    """A linear layer, and another whose rows have length one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(torch.relu(self.first(x)), functional.normalize(self.second.weight)).square().mean()


def home(value: Value) -> int | None:
    return value.type.layout.owner_on("pp")


def test_parameters_rest_with_their_layer_and_gradients_with_their_parameter() -> None:
    main = build(dense(), Config(pp=2, micro_batches=2)).module.main
    assert [(param.name, home(param)) for param in main.params] == [("x", None), ("a", 0), ("b", 1)]
    assert [home(result) for result in main.results] == [1, 0, 1]


def test_the_plan_s_text_holds_the_schedule_and_can_be_edited() -> None:
    step = tied()
    plan = build(step, Config(pp=2, micro_batches=2, schedule="gpipe"))
    text = render(plan.module)
    assert 'schedule\n  "F0.0 F0.1 B0.0 B0.1"\n  "F1.0 F1.1 B1.0 B1.1"\n' in text
    edited = text.replace("F0.0 F0.1 B0.0 B0.1", "F0.1 F0.0 B0.0 B0.1").replace("F1.0 F1.1", "F1.1 F1.0")
    assert_computes(step, Plan(plan.config, load(edited), lower(load(edited))))
    with pytest.raises(Diagnostic, match=r"blocks: worker 0 waits with B0\.0 for"):
        lower(load(text.replace("F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1").replace("F1.0 F1.1", "F1.1 F1.0")))


def test_a_tied_weight_rests_once_and_its_gradients_are_sent_once() -> None:
    plan = build(tied(), Config(pp=2, micro_batches=4))
    weight = next(param for param in plan.module.main.params if param.name == "a")
    assert home(weight) == 0
    sends = [op for op in plan.programs.joint.main.ops if op.name == SEND and op.results[0].type.shape == (6, 6)]
    assert [home(op.results[0]) for op in sends] == [1, 0], "the weight goes up once, the sum of gradients down once"


def test_1f1b_keeps_less_than_gpipe_on_the_first_worker() -> None:
    fused = fused_functions()

    def peak(schedule: str) -> int:
        plan = build(tied(rows=64, width=8), Config(pp=2, micro_batches=8, schedule=schedule))
        return program_peak(plan.programs.joint, fused, {"pp": 0})

    # A micro-batch keeps its 8 rows of 8 f64 for the backward: 8 of them against the 2 that are under way.
    assert peak("gpipe") - peak("1f1b") >= 5 * 8 * 8 * 8


def test_the_clock_of_a_worker_stands_still_while_it_waits() -> None:
    module = load("""// moai 1
mesh [pp=2]
func @work(%x: f32[4]) -> (f32[4]) {
  %y = aten.relu %x : f32[4]
  return %y
}
func @step(%x: f32[4]) -> (f32[4] on pp=1) {
  %a = call @work %x : f32[4] on pp=0
  %b = moai.send %a {axis = "pp"} : f32[4] on pp=1
  %c = call @work %b : f32[4] on pp=1
  return %c
}
""")
    first, send, second = module.main.ops
    run = simulate(module, {first: 3.0, send: 1.0, second: 2.0})
    assert dict(run.ends) == {0: 3.5, 1: 6.0}
    assert dict(run.busy) == {0: 3.5, 1: 2.5}
    assert run.last == 1


def test_what_runs_beside_is_waited_for_where_it_is_read() -> None:
    module = load("""// moai 1
mesh [dp=2]
func @work(%x: f32[4] +dp) -> (f32[4] +dp) {
  %y = aten.neg %x : f32[4] +dp
  return %y
}
func @read(%x: f32[4]) -> (f32[4]) {
  %y = aten.relu %x : f32[4]
  return %y
}
func @step(%x: f32[4] +dp) -> (f32[4], f32[4]) {
  %a = call @work %x : f32[4] +dp
  %b = moai.all_reduce %a {axis = "dp"} : f32[4]
  %c = call @work %a : f32[4] +dp
  %d = moai.all_reduce %c {axis = "dp"} : f32[4]
  %e = call @read %b : f32[4]
  return %d, %e
}
""")
    one, first, two, second, read = module.main.ops
    calls = {one: 3.0, two: 3.0, read: 1.0}

    def ends(summing: float, contention: float = 0.0, other: str = "") -> tuple[float, float, float]:
        run = simulate(module, {**calls, first: summing, second: summing}, {first: "", second: other}, contention)
        return run.ends[0], run.busy[0], run.exposed[0]

    assert ends(0.5) == (7.0, 7.0, 0.0)
    assert ends(2.0) == (8.0, 7.0, 1.0), "the last sum has one function to hide behind"
    # The first ends at 8, which @read waits for, and the second at 13.
    assert ends(5.0) == (13.0, 7.0, 6.0)
    # Half of what each sum takes is lost to the functions beside it.
    assert ends(0.5, contention=0.5) == (7.5, 7.0, 0.5)
    # On a stream of its own, the second begins at 6.
    assert ends(5.0, other="tp") == (11.0, 7.0, 4.0)


@given(st.lists(st.integers(0, 20), min_size=2, max_size=8), st.data())
def test_pieces_are_as_even_as_can_be(costs: list[int], data: st.DataObject) -> None:
    pieces = data.draw(st.integers(1, len(costs)))
    shares = data.draw(st.lists(st.integers(1, 5), min_size=pieces, max_size=pieces) | st.just([1] * pieces))
    crossing = data.draw(st.lists(st.integers(0, 9), min_size=len(costs) - 1, max_size=len(costs) - 1))
    found = balanced_partition([float(cost) for cost in costs], crossing, shares)
    assert found == sorted(found)
    assert set(found) == set(range(pieces))

    def per_share(borders: tuple[int, ...]) -> list[float]:
        pieces = pairwise((0, *borders, len(costs)))
        return [sum(costs[start:end]) / share for (start, end), share in zip(pieces, shares, strict=True)]

    def largest(borders: tuple[int, ...]) -> float:
        return max(per_share(borders))

    best = min(largest(borders) for borders in combinations(range(1, len(costs)), pieces - 1))
    borders = tuple(i for i in range(1, len(costs)) if found[i] != found[i - 1])
    assert largest(borders) <= best * (1 + SLACK) + 1e-6

    def rank(borders: tuple[int, ...]) -> tuple[int, float]:
        return sum(crossing[at - 1] for at in borders), sum(size**2 for size in per_share(borders))

    allowed = (each for each in combinations(range(1, len(costs)), pieces - 1) if largest(each) <= best * (1 + SLACK))
    assert rank(borders) == pytest.approx(min(map(rank, allowed)))


@pytest.mark.parametrize(
    ("request_text", "message"),
    [
        ("pp=3", "pp=3 needs 3 workers, there are 2"),
        ("pp=1,schedule=gpipe", "pp=1 has one stage"),
        ("schedule=diagonal", "there is no schedule `diagonal`"),
        ("pp=2,dp=2", "pp=2 with dp=2 needs 4 workers, there are 2"),
        ("pp=2,distribute_param=use", "over dp, which with pp=2 needs 4 workers, there are 2"),
    ],
)
def test_what_cannot_be_asked_for_is_said(request_text: str, message: str) -> None:
    with pytest.raises(Diagnostic) as error:
        candidates(dense(), 2, parse_request(request_text))
    assert message in str(error.value)


def test_more_stages_than_the_forward_has_ops_is_said() -> None:
    with pytest.raises(Diagnostic, match="pp=8 needs 8 stages, and the forward has"):
        build(dense(), Config(pp=8))


def test_a_schedule_is_read_from_the_file_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("F0.0 F0.1 B0.0 B0.1\nF1.0 F1.1 B1.0 B1.1\n")
    request = parse_request(f"pp=2,micro_batches=2,schedule={path}")
    (config,) = [each for each in candidates(dense(), 2, request) if each.recompute == "saved"]
    assert config.schedule == "F0.0 F0.1 B0.0 B0.1 / F1.0 F1.1 B1.0 B1.1"
    assert_computes(dense(), build(dense(), config))
