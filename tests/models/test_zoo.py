"""Common models: captured whole, and exact under plans of every kind."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moaic.check.proof import KEY, ProofOutcome, Verdict, compared, one_of_each_kind, plans_of, sampled
from moaic.check.workers import WorkerProof, with_tangent_of_loss_alone, workers
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.ops import OPS
from moaic.passes.config import Config
from moaic.planner.request import parse_request
from moaic.runtime.interpreter import run_function
from tests.models.conftest import Zoo
from tests.models.drawn import Drawn
from tests.models.zoo import DROPPING, MODELS

# Raised by PyTorch's own modules and by the models when they are imported or used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

TOLERANCE = {"resnet": 1e-4}
"""Batch norms over few values are badly conditioned in float32; 1e-5 for all others."""

ENOUGH = 1000

IMPOSSIBLE = {
    "resnet": "needs the whole batch|splits the sequence, and @step has none|is about logits",
    "mixtral": "a pipeline begins the backward of a micro-batch before the forward of others",
    "vit": "cp=2 does not divide a sequence of 5|is about logits",
    "vit_dropout": "splits the sequence, and @step has none|is about logits",
    "deepseek_v3": "is about logits",
    "remote": "cannot cut this loss",
    "recurrent": "cannot cut this loss",
    "recurrent_dropout": "cannot cut this loss",
}
"""Why plans are dropped: batch norms need the whole batch, balanced experts every forward before the first backward.
Where losses are cut: not every step makes logits, tiny experts make more, and a row of 7 has no halves."""

AMID = "a stage may begin amid the loss"
"""What may be in the way of cutting any loss: models are small, and several stages on each worker are many."""

CHUNKS = "loss_chunks=2"
ON_REQUEST = ("cp=2", "schedule=gpipe", CHUNKS)

CHUNKED = parse_request(CHUNKS)

FEW = {2: 1, 4: 1}
"""How many plans of every model are tried each time."""

ALIKE = (
    *("qwen2", "phi3", "opt", "mistral"),
    *(f"{name}_dropout" for name in ("vit", "opt", "bigcode", "recurrent", "t5")),
)
"""Models whose forms others have."""

TRIED = [pytest.param(name, marks=pytest.mark.exact) if name in ALIKE else name for name in MODELS]


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By every name that a parameter has."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


@pytest.mark.parametrize("name", TRIED)
def test_a_model_is_captured_whole_and_is_the_model(zoo: Zoo, name: str) -> None:
    """No op without a rule; as interpreted, in float32, it gives the loss and gradients of plain PyTorch.

    Which draws the same dropout.
    """
    function = zoo.take(name).captured.function
    assert {op.name for op in function.ops} <= set(OPS)
    model, batch = MODELS[name].model(), MODELS[name].batch()
    with Drawn(KEY) as drawn:
        loss = model(**batch).loss
    loss.backward()
    wanted = gradients_of(model)
    assert (drawn.draws > 0) == (name in DROPPING)

    step = with_tangent_of_loss_alone(zoo.proof(name).step).cast("f32")
    results = run_function(Module((function,)), function.name, step.inputs)
    roles = [function.result_role(index) for index in range(len(results))]
    kept = [i for i, role in enumerate(roles) if role.kind == "grad" or results[i].shape == ()]
    losses = [results[i] for i in kept if roles[i].kind == "output"]
    torch.testing.assert_close(losses[0], loss.detach(), rtol=1e-5, atol=1e-5)
    grads = [i for i in kept if roles[i].kind == "grad"]
    main = replace(
        function, results=tuple(function.results[i] for i in grads), result_roles=tuple(roles[i] for i in grads)
    )
    verdict = compared(
        Config(), main, [results[i] for i in grads], [wanted[roles[i].label] for i in grads], TOLERANCE.get(name, 1e-5)
    )
    assert verdict.outcome is ProofOutcome.PASS, verdict
    distinct = {id(gradient) for gradient in wanted.values()}
    assert len(grads) == len(distinct)


@pytest.mark.parametrize("ranks", FEW)
@pytest.mark.parametrize("name", TRIED)
def test_some_plans_are_exact(zoo: Zoo, name: str, ranks: int) -> None:
    proof = zoo.proof(name)
    configs = sampled(plans_of(proof.step.module, ranks), FEW[ranks])
    found = [proof.verdict(config, halves=config is configs[-1]) for config in configs]
    for verdict in found:
        check(zoo, name, verdict)
    assert any(verdict.outcome is ProofOutcome.PASS for verdict in found)


@pytest.mark.exact
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_all_plans_are_exact(zoo: Zoo, name: str, ranks: int) -> None:
    """Every fourth plan also as forward and backward one after the other; of those for eight ranks, some."""
    proof = zoo.proof(name)
    configs = all_plans(proof.step.module, ranks)
    configs = configs if ranks < 8 else sampled(configs, 12)
    found = [proof.verdict(config, halves=index % 4 == 0) for index, config in enumerate(configs)]
    for verdict in found:
        check(zoo, name, verdict)
    assert any(verdict.outcome is ProofOutcome.PASS for verdict in found)


@pytest.mark.exact
def test_a_thousand_pairs_were_proved(zoo: Zoo) -> None:
    """By the tests above."""
    if {name for name, _, _ in zoo.passed} < set(MODELS):
        pytest.skip("not all models were chosen")
    assert zoo.pairs(on_workers=False) >= ENOUGH


@pytest.mark.parametrize("name", ["gemma2", "bert", "t5", "remote"])
def test_losses_in_chunks_are_exact(zoo: Zoo, name: str) -> None:
    """With a soft cap, of few tokens of each row, of rows of unequal lengths, of logits cut short."""
    proof = zoo.proof(name)
    for config in sampled(plans_of(proof.step.module, 2, CHUNKED), 3):
        check(zoo, name, proof.verdict(config))


def all_plans(step: Module, ranks: int) -> list[Config]:
    """The candidates, and plans that nobody would try for so short a sequence and so few rows without being asked."""
    plans = dict.fromkeys(plans_of(step, ranks))
    for text in ON_REQUEST:
        with suppress(Diagnostic):
            plans |= dict.fromkeys(plans_of(step, ranks, parse_request(text)))
    return list(plans)


def check(zoo: Zoo, name: str, verdict: Verdict, *, on_workers: bool = False) -> None:
    """Nothing fails, and only what is known to be impossible is dropped."""
    zoo.count(name, verdict, on_workers=on_workers)
    assert verdict.outcome is not ProofOutcome.FAIL, f"{verdict.config}: {verdict.reason}"
    if verdict.outcome is ProofOutcome.DROPPED:
        known = re.search(f"{IMPOSSIBLE.get(name, AMID)}|{AMID}", verdict.reason)
        assert known, f"{verdict.config}: {verdict.reason}"


@pytest.mark.parametrize(("name", "most"), [("gemma2", 3), ("gpt2_dropout", 1)])
def test_workers_run_some_plans(zoo: Zoo, name: str, most: int) -> None:
    run_on_workers(zoo, name, 2, most, compiled=False)


@pytest.mark.exact
@pytest.mark.parametrize(("name", "count"), [("llama", 2), ("llama", 4), ("t5", 2), ("qwen2_moe", 2), ("remote", 2)])
def test_workers_run_plans_of_every_kind(zoo: Zoo, name: str, count: int) -> None:
    """Op by op, in float32."""
    run_on_workers(zoo, name, count, None, compiled=False)


@pytest.mark.exact
@pytest.mark.parametrize("name", MODELS)
def test_workers_run_every_model(zoo: Zoo, name: str) -> None:
    run_on_workers(zoo, name, 2, 6, compiled=False)


@pytest.mark.exact
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_workers_run_compiled_plans(zoo: Zoo, name: str) -> None:
    run_on_workers(zoo, name, 2, 2, compiled=True)


def run_on_workers(zoo: Zoo, name: str, count: int, most: int | None, *, compiled: bool) -> None:
    """At most so many plans of different kinds; of each kind one if nothing is said."""
    step = zoo.proof(name).step
    proof = WorkerProof(step, compiled=compiled)
    configs = one_of_each_kind(plans_of(step.module, count))
    chunked = one_of_each_kind(plans_of(step.module, count, CHUNKED))
    with workers(count) as accelerator:
        for config in [*configs, *chunked] if most is None else [*sampled(configs, most), *sampled(chunked, 1)]:
            check(zoo, name, proof.verdict(config, accelerator), on_workers=True)
