"""Plans of steps in eight-bit floats equal one device: scales are of whole rows, columns or tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from moaic.capture.trace_only import CapturedCall, take_call
from moaic.check.proof import Proof, ProofOutcome, one_of_each_kind, plans_of, sampled, step_of
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.types import FLOAT8
from moaic.passes.build import Builder, build
from moaic.planner.request import parse_request
from tests.exact.float8 import GRADIENT, RECIPES, SIZES, batch, beside_torchao, is_computed_here, llama

pytestmark = [
    # PyTorch 2.15 wants another name of it than torchao uses.
    pytest.mark.filterwarnings("ignore:torch.get_autocast_gpu_dtype:DeprecationWarning"),
]

pytest.importorskip("torchao.float8")

ANY_ROWS = "float8"
"""The precision in which no product waits for the whole batch."""

SCALED = "float8_tensorwise"
"""The precision whose scales are of whole tensors, which every split has to find from its parts."""


@cache
def taken(precision: str) -> CapturedCall:
    torch.compiler.reset()
    return take_call(llama(), batch(), {"precision": precision})


@cache
def step(precision: str) -> Module:
    return Module((taken(precision).captured.function,))


@cache
def proof(precision: str) -> Proof:
    return Proof(step_of(taken(precision)))


WHOLE_BATCH = r"mb=\d cannot pass aten.amax .* it needs the whole batch"


EVERY_RECIPE = [pytest.param(each, marks=pytest.mark.exact if each != SCALED else ()) for each in RECIPES]
"""One in every run, the others in the long one."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exact)])
@pytest.mark.parametrize("precision", EVERY_RECIPE)
def test_plans_compute_the_graph(precision: str, ranks: int) -> None:
    """In float64, with the casts to eight bits as they are: a scale that is off by a bit would show."""
    kinds = one_of_each_kind(plans_of(step(precision), ranks))
    for config in sampled(kinds, 3 if ranks == 2 else len(kinds)):
        verdict = proof(precision).verdict(config)
        if precision != ANY_ROWS and config.micro_batches > 1:
            assert verdict.outcome is ProofOutcome.DROPPED
            assert verdict.reason.startswith("mb=")
            assert "aten.amax" in verdict.reason
        else:
            assert verdict.outcome is ProofOutcome.PASS, f"{config}: {verdict}"


@pytest.mark.parametrize("precision", EVERY_RECIPE)
def test_a_split_sequence_is_exact_too(precision: str) -> None:
    """Its parts are no runs of rows of the products: a row of the batch has some in each."""
    for text in ("cp=2,micro_batches=1", "cp=2,dp=2,micro_batches=1"):
        config = plans_of(step(precision), text.count("=2") * 2, parse_request(text))[0]
        verdict = proof(precision).verdict(config)
        assert verdict.outcome is ProofOutcome.PASS, verdict


@pytest.mark.parametrize("precision", EVERY_RECIPE)
def test_scales_are_found_from_parts(precision: str) -> None:
    """A split batch sends gradients and, per scale, one number from each rank: never what is cast."""
    config = plans_of(step(precision), 2, parse_request("dp=2,micro_batches=1,distribute_param=none"))[0]
    joint = Builder(step(precision)).build(config).programs.joint
    gathered = [next(op.inputs()).type for op in joint.main.ops if op.name == "moai.all_gather"]
    assert all(kind.shape[0] == 2 and kind.elements() <= 2 * SIZES["intermediate_size"] for kind in gathered)
    assert bool(gathered) == (precision != ANY_ROWS)


def test_eight_bits_travel() -> None:
    """What is gathered for a product is gathered after the cast, where it is large enough to matter."""
    torch.compiler.reset()
    model = llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=1)
    ids = torch.zeros(64, 16, dtype=torch.int64)
    taken = take_call(model, {"input_ids": ids, "labels": ids}, {"precision": ANY_ROWS})
    wide = Module((taken.captured.function,))
    config = plans_of(wide, 2, parse_request("tp=2,micro_batches=1"))[0]
    joint = Builder(wide).build(config).programs.joint
    gathered = {next(op.inputs()).type.dtype for op in joint.main.ops if op.name == "moai.all_gather"}
    assert gathered & FLOAT8


def test_micro_batches_say_what_is_in_their_way() -> None:
    config = plans_of(step("float8_tensorwise"), 2, parse_request("dp=2,micro_batches=2"))[0]
    with pytest.raises(Diagnostic, match=WHOLE_BATCH):
        build(step("float8_tensorwise"), config)


@pytest.mark.parametrize(
    ("precision", "plan"),
    [
        *(
            pytest.param(ANY_ROWS, plan, marks=pytest.mark.exact)
            for plan in ("one", "dp2_mb2", "tp2", "cp2", "pp2", "use")
        ),
        *(pytest.param(each, "dp2", marks=pytest.mark.exact) for each in RECIPES),
    ],
)
def test_workers_train_with_torchao_s_layers(precision: str, plan: str) -> None:
    if not is_computed_here(precision):
        pytest.skip("there is nothing to compare with")
    beside_torchao(precision, plan)


def test_a_model_that_torchao_converted_is_planned_as_well() -> None:
    from torchao.float8 import convert_to_float8_training  # pyright: ignore[reportMissingTypeStubs]

    torch.compiler.reset()
    torch.manual_seed(0)
    convert: Any = convert_to_float8_training
    model, host = (convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16()) for _ in range(2))
    host.load_state_dict(model.state_dict())
    narrow: Any = torch.compile(model.to("moai"), backend="moai", options={"dp": 2, "compile": False})
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    found, expected = narrow(x.to("moai")), host(x)
    for y in (found, expected):
        y.float().square().mean().backward()
    assert type(model[0]).__name__ == "Float8Linear"
    pairs = zip((found, model[0].weight.grad), (expected, host[0].weight.grad), strict=True)
    assert all((ours.cpu() - theirs).norm() <= GRADIENT * theirs.norm() for ours, theirs in pairs)
