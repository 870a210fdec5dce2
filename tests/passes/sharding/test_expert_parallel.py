"""The axis `ep`: experts sharded, tokens gathered; the sum over experts and its balancing loss are exact."""

from __future__ import annotations

import re
from math import prod

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module, Op
from moaic.ir.layout import REPLICATED
from moaic.passes.config import Request
from moaic.passes.loop_axes import MICRO_BATCHES
from moaic.passes.perf.flops import function_flops
from moaic.passes.sharding.axis import Axis
from moaic.passes.sharding.data_parallel import split_into_micro_batches
from moaic.passes.sharding.expert_parallel import in_blocks, shard_experts
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.transforms.outline import outline
from moaic.passes.transforms.recompute import recompute
from moaic.planner.candidates import candidates
from moaic.runtime.interpreter import run_function
from tests.exact.models import MIXTURE
from tests.passes.models import LENGTH, MIXTURES, ROWS, WIDTH, Proof, close, config, proof
from tests.passes.steps import dense


def products(module: Module) -> list[Op]:
    return [op for function in module.functions for op in function.ops if op.name.startswith("moai.grouped")]


PLANS = ("ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "cp=2,ep=2")

OFTEN = {"mixtral": PLANS[:1], "qwen2_moe": PLANS[1:3], "qwen3_moe": PLANS}
"""What CI tries of it."""

CASES = [
    pytest.param(name, plan, marks=[] if plan in OFTEN[name] else pytest.mark.exact)
    for name in MIXTURES
    for plan in PLANS
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_split_experts_are_exact(name: str, plan: str) -> None:
    made = proof(name).prove(config(plan)).module
    n = config(plan).ep
    lie = {made.main.param_role(i).label: value for i, value in enumerate(made.main.params)}
    experts = [value for label, value in lie.items() if label.endswith(("gate_up_proj", "down_proj"))]
    assert {value.type.layout.state("ep") for value in experts} == {(0, experts[0].type.shape[0] // n)}
    assert all(
        value.type.layout.state("ep") == REPLICATED
        for value in lie.values()
        if value not in experts and is_weight(value.name)
    )


def is_weight(name: str) -> bool:
    return name.endswith("weight")


@pytest.mark.parametrize("plan", ["ep=2,micro_batches=2", "dp=2,ep=2,distribute_param=use"])
def test_beside_micro_batches_and_distributed_parameters(plan: str) -> None:
    proof("qwen2_moe").prove(config(plan))


def test_no_token_meets_an_expert_that_it_did_not_choose() -> None:
    made = proof("mixtral").builder.build(config("ep=2")).module
    assert len(products(made)) == 6, "two products forward, two gradients of tokens and two of matrices backward"
    chosen = ROWS * LENGTH * 2
    for op in products(made):
        ids = list(op.inputs())[2]
        assert ids.type.shape == (chosen,)
        assert ids.type.layout.state("ep") == REPLICATED
    for function in made.functions:
        for op in function.ops:
            if op.name == "moai.grouped_mm":
                assert op.results[0].type.layout.state("ep") == (0, 1), "in blocks, one per rank"


def test_what_lies_between_products_is_never_sent() -> None:
    made = proof("mixtral").builder.build(config("ep=2")).module
    sent = [op.results[0] for f in made.functions for op in f.ops if op.attrs.get("axis") == "ep"]
    inner = ROWS * LENGTH * 2 * 24
    assert not [value for value in sent if prod(value.type.shape) >= 2 * inner and value.type.shape[-1] != WIDTH]


def test_blocks_change_nothing() -> None:
    whole = proof("mixtral")
    module = in_blocks(whole.builder.build(config("dp=1")).module, 4)
    assert any(len(op.results[0].type.shape) == 3 for op in products(module) if op.name == "moai.grouped_mm")
    close(whole, run_function(module, module.main.name, whole.step.inputs), config("dp=1"))


@pytest.fixture(scope="module")
def narrow() -> Proof:
    """Of so few words that most of the work is in the layers."""
    return Proof(MIXTURE.make, MIXTURE.draw)


@pytest.mark.parametrize("plan", ["micro_batches=2", "dp=2,micro_batches=2", "ep=2,micro_batches=4,recompute=full"])
def test_backwards_wait_for_what_balances_all_forwards(narrow: Proof, plan: str) -> None:
    wanted = config(plan)
    narrow.prove(wanted)
    step = narrow.step.module
    outlined = recompute(outline(step), wanted.recompute)
    timed = split_into_micro_batches(outlined, Axis(MICRO_BATCHES, wanted.micro_batches, is_loop=True))
    assert timed.early_flops < 0.05 * function_flops(step, step.main), "nothing is done twice"


def test_a_pipeline_does_not_wait(narrow: Proof) -> None:
    with pytest.raises(Diagnostic, match=r"a pipeline begins the backward.*modeling_mixtral.*needs a sum over all"):
        narrow.builder.build(config("pp=2,micro_batches=2"))


def test_what_has_no_experts() -> None:
    with pytest.raises(Diagnostic, match=re.escape("ep=2 splits experts, and @step has none")):
        shard_experts(dense(), Axis("ep", 2), CostCoefficients())


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(Diagnostic, match=re.escape("ep=3 does not divide 4 experts; ep=2 or ep=4 would")):
        shard_experts(proof("mixtral").step.module, Axis("ep", 3), CostCoefficients())


def test_candidates_split_experts_where_there_are_any() -> None:
    assert {each.ep for each in candidates(proof("mixtral").step.module, 8, Request())} == {1, 2, 4}
    assert {each.ep for each in candidates(dense(), 8, Request())} == {1}
