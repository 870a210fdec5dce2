"""`precision="bf16"` computes as under autocast, in every plan, and leaves parameters in float32."""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moaic.capture.trace_only import take_call
from moaic.check.proof import CapturedStep, Proof, ProofOutcome, compared, in_one, plans_of, sampled, step_of
from moaic.compile.planning import request_of
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.ir.types import FLOATING
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.planner.request import parse_request
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.interpreter import run_function
from tests.exact.models import EXAMPLES
from tests.exact.training import PLANS, Batch, Call, Trainee, check, compiled, gradients

NARROW = {"precision": "bf16"}

LOSS = 1e-3
GRADIENT = 2e-2
"""Distances from autocast on the host: bfloat16 has 8 bits, the same products are rounded in another order. Autocast
itself is some 1e-2 of a gradient's norm away from float32."""

ROUNDING = 0.05
"""Largest distance of an element of a plan from that of one device, relative to the largest: parts are rounded."""


@cache
def taken(name: str) -> tuple[Module, CapturedStep]:
    """A model's graph with the casts of the option, and its step in float64."""
    torch.compiler.reset()
    one = take_call(EXAMPLES[name].model(), EXAMPLES[name].batch(), NARROW)
    return Module((one.captured.function,)), step_of(one)


@cache
def proof(name: str) -> Proof:
    return Proof(taken(name)[1])


@cache
def in_its_types(name: str) -> tuple[CapturedStep, list[Tensor]]:
    """The step with values in the types that the graph says, and what it gives on one device."""
    module, wide = taken(name)
    values = zip(wide.inputs, module.main.params, strict=True)
    step = CapturedStep(module, tuple(value.to(DTYPES[param.type.dtype]) for value, param in values))
    return step, run_function(module, module.main.name, step.inputs)


@cache
def builder(name: str) -> Builder:
    return Builder(taken(name)[0])


def run(name: str, config: Config) -> list[Tensor]:
    """On virtual ranks, in the types that the graph says."""
    return in_one(in_its_types(name)[0], builder(name).build(config).programs)


def config_of(name: str, text: str) -> Config:
    request = parse_request(text)
    return next(config for config in plans_of(taken(name)[0], 2, request) if request.admits(config))


def under_autocast(model: nn.Module) -> Call:
    def call(**batch: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch)

    return call


def beside_autocast(model: nn.Module, call: Call, batch: Batch) -> None:
    """Loss and gradients are those of the host's model under autocast; nothing that is kept has become narrow."""
    host = EXAMPLES["llama"].model()
    found, expected = call(**batch), under_autocast(host)(**batch)
    assert found.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert abs(found.loss.item() - expected.loss.item()) <= LOSS * expected.loss.item()
    found_gradients = gradients(model, call, batch)
    check(found_gradients, gradients(host, under_autocast(host), batch), GRADIENT, "the gradient of")
    assert {each.dtype for each in (*model.parameters(), *found_gradients.values())} == {torch.float32}


def test_an_unmodified_model_computes_as_under_autocast() -> None:
    torch.compiler.reset()
    model = EXAMPLES["llama"].model().to("moai")
    call = compiled(model, PLANS["dp2_mb2"], compile=False, **NARROW)
    beside_autocast(model, call, EXAMPLES["llama"].batch())
    optimizer = torch.optim.AdamW(model.parameters())
    call(**EXAMPLES["llama"].batch()).loss.backward()
    optimizer.step()
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.compiler.reset()
    return Trainee(EXAMPLES["llama"], **NARROW)


@pytest.mark.exact
@pytest.mark.parametrize("plan", [name for name in PLANS if name != "ep2"])
def test_every_plan_computes_as_under_autocast(trainee: Trainee, plan: str) -> None:
    trainee.use(plan)
    beside_autocast(trainee.model, trainee.call, EXAMPLES["llama"].batch())


def test_the_graph_is_that_of_autocast_around_the_call() -> None:
    model, batch = EXAMPLES["llama"].model(), EXAMPLES["llama"].batch()
    with torch.autocast("cpu", torch.bfloat16):
        around = take_call(model, batch).captured.function
    assert render(Module((around,))) == render(taken("llama")[0])


@pytest.mark.parametrize(
    ("name", "most"), [("llama", 1), *(pytest.param(name, 24, marks=pytest.mark.exact) for name in ("llama", "gpt2"))]
)
def test_plans_differ_from_one_device_by_the_order_of_sums_alone(name: str, most: int) -> None:
    """In float64, where that order does not matter, they agree; in the graph's own types by their rounding."""
    module = taken(name)[0]
    step, expected = in_its_types(name)
    for config in sampled(plans_of(module, 2), most):
        verdict = proof(name).verdict(config, halves=most > 3)
        assert verdict.outcome is ProofOutcome.PASS, verdict
        rounded = compared(config, step.module.main, run(name, config), expected, ROUNDING)
        assert rounded.outcome is ProofOutcome.PASS, rounded


@pytest.mark.parametrize("level", [pytest.param("step", marks=pytest.mark.exact), "use"])
def test_parameters_are_gathered_after_the_cast(level: str) -> None:
    text = f"dp=2,tp=1,pp=1,micro_batches=2,recompute=saved,distribute_param={level}"
    wide, narrow = (config_of("llama", f"{text},distribute_low_prec_param={low}") for low in ("false", "true"))
    gathered = {config: gathers(config) for config in (wide, narrow)}
    assert gathered[wide] == {"f32"}
    # The embedding is looked up in float32, and norms multiply by their weights in it.
    assert gathered[narrow] == {"f32", "bf16"}
    for ours, theirs in zip(run("llama", narrow), run("llama", wide), strict=True):
        assert torch.equal(ours, theirs)


def gathers(config: Config) -> frozenset[str]:
    """Types in which a plan gathers parameters."""
    joint = render(builder("llama").build(config).programs.joint)
    return FLOATING.intersection(re.findall(r"moai\.all_gather .* : (\w+)\[", joint))


@pytest.mark.parametrize("value", ["fp4", 16, "float32"])
def test_a_precision_that_there_is_not(value: object) -> None:
    with pytest.raises(
        Diagnostic, match=rf"invalid value `{value}` for precision\n.*choose True, False, bf16, bfloat16, fp16"
    ):
        compiled(nn.Linear(2, 2), {}, precision=value)


def test_it_is_no_decision_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert request_of(NARROW) == request_of({})
    monkeypatch.setenv("MOAI_PLAN", "precision=bf16")
    with pytest.raises(Diagnostic, match="there is no plan option `precision`"):
        request_of({})


class Asks(nn.Module):
    """Keeps a product out of autocast, as models do with positions, and follows the type of another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                whole = x @ x
        else:
            whole = x @ x
        y = self.linear(x)
        rows = torch.arange(4, device=y.device)
        return whole, torch.zeros(4, 4, dtype=y.dtype, device=y.device).index_add(0, rows, y)


@pytest.mark.parametrize("where", ["moai", "cpu"])
def test_a_model_s_own_python_sees_autocast(where: str) -> None:
    torch.compiler.reset()
    model = Asks().to(where)
    settings: Any = {**NARROW, "compile": False}
    whole_model: Any = torch.compile(model, backend="moai", options=settings)
    for call in (
        whole_model,
        copy.deepcopy(whole_model),
        torch.compile(model.forward, backend="moai", options=settings),
    ):
        whole, y = call(torch.ones(4, 4).to(where) + 2**-10)
        assert (whole.dtype, y.dtype) == (torch.float32, torch.bfloat16)
        assert whole[0, 0].item() == 4 * (1 + 2**-10) ** 2
        assert not torch.is_autocast_enabled(where)


def test_switched_off_it_leaves_the_model_as_it_is() -> None:
    model, settings = nn.Linear(2, 2), dict[str, Any](NARROW)
    assert torch.compile(model, backend="moai", options=settings, disable=True) is model
    assert "forward" not in vars(model)


def test_other_backends_are_left_alone() -> None:
    torch.compiler.reset()
    seen: list[object] = []

    def other(graph: Any, examples: Any, **given: object) -> Any:
        seen.append(given)
        return graph.forward

    settings: Any = NARROW
    out = torch.compile(nn.Linear(2, 2), backend=other, options=settings)(torch.ones(2, 2))
    assert out.dtype == torch.float32
    assert seen == [{"options": NARROW}]
