"""The passes of a plan can be run by name with the same options, and each has a data test of its name."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from moaic.ir.errors import Diagnostic
from moaic.ir.printer import render
from moaic.ir.verify import load
from moaic.passes.build import build, passes_of
from moaic.passes.config import spelled
from moaic.passes.pass_options import Pass, parse_pass, usage
from moaic.passes.registry import PASSES, run_passes
from moaic.passes.sharding.solver.costs import CostCoefficients
from tests.passes.models import config, proof

DATA = Path(__file__).parents[1] / "data"

PLANS = {
    "gpt2": ["dp=2,micro_batches=2,recompute=full,distribute_param=use", "tp=2,loss_chunks=2"],
    "llama": ["cp=2,gather_keys=false", "pp=2,micro_batches=2,schedule=zero-bubble"],
    "mixtral": ["ep=2"],
}


def written(each: Pass) -> str:
    """The pass as `moaic opt -p` takes it."""
    found: Any = each
    values = [getattr(each, field.name) for field in fields(found) if field.name != "coefficients"]
    return f"{each.name}={':'.join(map(spelled, values))}"


@pytest.mark.parametrize(("model", "plan"), [(model, plan) for model, plans in PLANS.items() for plan in plans])
def test_passes_by_name_make_the_module_of_the_plan(model: str, plan: str) -> None:
    step, wanted = proof(model).step.module, config(plan)
    words = ["outline", *map(written, passes_of(wanted, CostCoefficients()))]
    assert render(run_passes(step, ",".join(words))) == render(build(step, wanted).module)


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_without_options_is_the_pass_itself(name: str) -> None:
    assert parse_pass(PASSES[name], "") == PASSES[name]()


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_has_a_data_test(name: str) -> None:
    guarantee, *rest = (DATA / f"{name}.moai").read_text(encoding="utf-8").splitlines()
    assert guarantee.startswith("// ")
    assert guarantee.endswith(".")
    runs = [line.split()[5].split(",") for line in rest if line.startswith("// RUN: moaic opt -p ")]
    assert any(name == word.partition("=")[0] for words in runs for word in words)


@pytest.mark.parametrize("name", [name for name, each in PASSES.items() if usage(each) != name])
def test_a_pass_knows_its_options(name: str) -> None:
    with pytest.raises(Diagnostic, match=r"`?nothing`?"):
        run_passes(load("func @step(%x: f32[8]) -> (f32[8]) { return %x }"), f"{name}=nothing")


FILES = ["dp", "hoist_nested", "lower", "pp_tied", "weights"]
MORE = ["mb", "tp", "recompute", "ep", "cp", "hoist", "distribute", "chunk", "softmax", "promote"]


@pytest.mark.parametrize("name", [*FILES, *(pytest.param(each, marks=pytest.mark.exact) for each in MORE)])
def test_any_two_passes_give_a_module_or_a_reason(name: str) -> None:
    module = load((DATA / f"{name}.moai").read_text(encoding="utf-8").split("// -----")[0])
    for one, other in itertools.product(PASSES, repeat=2):
        with suppress(Diagnostic):
            run_passes(module, f"{one},{other}")
