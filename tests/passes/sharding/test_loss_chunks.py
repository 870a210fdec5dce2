"""Losses in chunks: logits of one chunk at a time, and exact results."""

from __future__ import annotations

import logging
from math import prod

import pytest
from torch import Tensor, nn

from moaic.check.proof import in_halves
from moaic.ir.errors import Diagnostic
from moaic.passes.config import Config, Request
from moaic.passes.estimate.memory import fused_functions, memory_of
from moaic.passes.lowering.plan import Plan
from moaic.passes.sharding.loss_chunks import in_chunks, logits_of
from moaic.passes.transforms.outline import outline
from moaic.planner import candidates
from moaic.planner.search import search
from moaic.planner.worker import InProcessPool
from tests.exact.models import llama
from tests.passes.models import LENGTH, MIXTURES, MODELS, ROWS, SIZES, VOCABULARY, WIDTH, Proof, close, config, proof
from tests.passes.steps import dense, machine

PLANS = {
    "loss_chunks=2": 2,
    "loss_chunks=8": 8,
    "recompute=full,loss_chunks=4": 4,
    "dp=2,loss_chunks=4": 8,
    "tp=2,loss_chunks=4": 8,
    "cp=2,loss_chunks=4": 8,
    "micro_batches=2,loss_chunks=4": 8,
    "dp=2,micro_batches=2,distribute_param=use,loss_chunks=2": 8,
    "dp=2,cp=2,tp=2,loss_chunks=2": 16,
}
"""And in how many parts they make logits."""


def largest(plan: Plan) -> int:
    """Elements of the largest value that a rank holds where nobody reads the logits."""
    program = plan.programs.joint
    values = {value for function in program.functions for value in function.values()}
    return max(prod(value.type.local_shape(program.mesh)) for value in values)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_made_one_chunk_at_a_time(name: str, plan: str) -> None:
    """And read, they are put together from chunks."""
    made = proof(name).prove(config(plan))
    assert largest(made) == ROWS * LENGTH * VOCABULARY // PLANS[plan]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_has_a_loss_in_chunks_beside_others(name: str) -> None:
    proof(name).prove(config("loss_chunks=4"))


class Smoothed(nn.Module):
    """Words alone, with smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.words(input_ids) * attention_mask.unsqueeze(-1))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("plan", ["loss_chunks=4", "dp=2,loss_chunks=2", "tp=2,loss_chunks=2"])
def test_labels_may_be_smoothed_and_a_head_may_have_a_bias(plan: str) -> None:
    made = Proof(Smoothed).prove(config(plan))
    assert largest(made) == ROWS * LENGTH * VOCABULARY // 4


@pytest.mark.parametrize("plan", ["loss_chunks=4", "dp=2,tp=2,loss_chunks=2", "micro_batches=2,loss_chunks=2"])
def test_a_forward_in_chunks_may_run_before_its_backward(plan: str) -> None:
    found = proof("llama")
    results = in_halves(found.step, found.builder.build(config(plan)).programs)
    close(found, results, config(plan))


@pytest.fixture(scope="module")
def heavy() -> Proof:
    """Layers that outweigh the last product, so that a pipeline has all of the loss on its last worker."""
    return Proof(lambda: llama(**SIZES | {"intermediate_size": 2048, "num_hidden_layers": 8}))


@pytest.mark.parametrize(
    "schedule", [*(pytest.param(name, marks=pytest.mark.exact) for name in ("1f1b", "interleaved")), "zero-bubble"]
)
def test_the_last_worker_of_a_pipeline_keeps_no_logits_for_its_backward(heavy: Proof, schedule: str) -> None:
    """It makes their gradients with them, chunk by chunk."""
    asked = f"pp=2,micro_batches=2,schedule={schedule}"
    whole, chunked = heavy.builder.build(config(asked)), heavy.prove(config(f"{asked},loss_chunks=4"))
    assert keeps_logits(whole)
    assert not keeps_logits(chunked)


def keeps_logits(plan: Plan) -> bool:
    """Whether anything as wide goes from one function to another."""
    return any(value.type.shape[-1:] == (VOCABULARY,) for value in plan.programs.joint.main.values())


def test_gradients_of_the_weight_are_added_to_one_sum_over_chunks_and_micro_batches() -> None:
    main = proof("llama").builder.build(config("micro_batches=4,loss_chunks=2")).programs.joint.main
    weights = [op for op in main.ops if op.name == "moai.accumulate" and op.results[0].type.shape[:1] == (VOCABULARY,)]
    assert len(weights) == 2, "of the head and of the embedding, each begun at nothing"


def test_it_is_chosen_where_memory_is_short(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "moaic")
    monkeypatch.setattr(candidates, "WIDE", 1)
    found = proof("llama")
    whole, chunked = (
        memory_of(found.builder.build(Config(loss_chunks=count)), fused_functions()).peak for count in (1, 8)
    )
    alone = Request(dp=1, tp=1, pp=1, cp=1, micro_batches=1, recompute="saved")
    for memory, chunks in ((2 * whole, 1), ((whole + chunked) // 2, 8)):
        selection = search(found.step.module, machine(workers=1, memory=memory), alone, pool=InProcessPool())
        assert selection.plan.config == Config(loss_chunks=chunks)
    assert "loss_chunks : 8" in caplog.text


def test_outputs_that_would_not_fit_are_said(caplog: pytest.LogCaptureFixture) -> None:
    found = proof("llama")
    peak = memory_of(found.builder.build(Config()), fused_functions()).peak
    request = Request(dp=1, tp=1, pp=1, cp=1, micro_batches=1, recompute="saved", loss_chunks=1)
    search(found.step.module, machine(workers=1, memory=peak), request, pool=InProcessPool())
    assert "fits if of a model's outputs only the loss is still held when backward() comes" in caplog.text
    caplog.clear()
    search(found.step.module, machine(workers=1, memory=2 * peak), request, pool=InProcessPool())
    assert "only the loss" not in caplog.text


def test_small_logits_are_looked_at_whole() -> None:
    assert {each.loss_chunks for each in candidates.candidates(proof("llama").step.module, 2, Request())} == {1}


def test_a_step_without_logits_says_so() -> None:
    assert logits_of(dense().main) is None
    with pytest.raises(Diagnostic, match="loss_chunks=2 is about logits, and the last product of this step is not"):
        in_chunks(outline(dense()), 2)


def test_chunks_that_do_not_divide_say_so() -> None:
    with pytest.raises(
        Diagnostic, match="loss_chunks=3 cannot cut this loss into equal chunks: its logits are 128 x 4096"
    ):
        proof("llama").builder.build(config("dp=2,loss_chunks=3"))


def test_what_is_not_a_number_of_chunks_says_so() -> None:
    with pytest.raises(Diagnostic, match="loss_chunks=0 is not a positive whole number"):
        config("loss_chunks=0")
