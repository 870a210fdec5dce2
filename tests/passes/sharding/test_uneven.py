"""Sizes with few divisors: every plan runs exactly, or states why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from moaic.ir.errors import Diagnostic
from moaic.passes.config import Config, Request
from moaic.planner.candidates import candidates
from tests.exact.example import IGNORED, Batch
from tests.passes.models import EXPERTS, Proof, config

ROWS, LENGTH, HEADS, VOCABULARY = 5, 9, 7, 33

SIZES = {**EXPERTS, "hidden_size": 28, "num_attention_heads": HEADS, "vocab_size": VOCABULARY}


def dense() -> nn.Module:
    settings: Any = Qwen2Config
    sizes = {name: SIZES[name] for name in SIZES if "expert" not in name and "router" not in name}
    return Qwen2ForCausalLM(settings(**{**sizes, "num_key_value_heads": 1, "intermediate_size": 15}))


def mixture() -> nn.Module:
    settings: Any = MixtralConfig
    sizes = {**SIZES, "num_key_value_heads": HEADS, "intermediate_size": 15, "num_local_experts": 3}
    return MixtralForCausalLM(settings(**sizes))


def tokens(seed: int, rows: int) -> Batch:
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, IGNORED)}


@pytest.fixture(scope="module")
def proofs() -> dict[str, Proof]:
    return {"dense": Proof(dense, tokens, ROWS), "mixture": Proof(mixture, tokens, ROWS)}


ASKED = [
    "cp=3",
    "tp=3",
    "tp=7",
    "ep=3",
    "cp=3,micro_batches=5",
    "dp=5,cp=3",
    "cp=3,tp=2",
    "cp=2",
    "ep=2",
    "tp=5",
    "tp=4",
]

EXACT = {
    "dense": ["cp=3", "tp=3", "tp=7", "cp=3,micro_batches=5", "dp=5,cp=3"],
    "mixture": ["cp=3", "tp=3", "tp=7", "ep=3", "cp=3,micro_batches=5", "dp=5,cp=3"],
}
"""The others are dropped: two does not divide seven heads, nine tokens or three experts."""


@pytest.mark.parametrize("name", EXACT)
def test_what_divides_is_exact_and_what_does_not_says_so(name: str, proofs: dict[str, Proof]) -> None:
    reasons: dict[str, str] = {}
    for plan in ASKED:
        try:
            proofs[name].prove(config(plan))
        except Diagnostic as reason:
            reasons[plan] = reason.message
    assert [plan for plan in ASKED if plan not in reasons] == EXACT[name]
    assert reasons["cp=2"] == "cp=2 does not divide a sequence of 9; cp=3 or cp=9 would"
    where = "divides neither the 7 heads nor the rows of model.layers.*.self_attn; tp=7 would"
    assert reasons["tp=4"] == f"tp=4 {where}"
    assert reasons["ep=2"] == (
        "ep=2 splits experts, and @step has none" if name == "dense" else "ep=2 does not divide 3 experts; ep=3 would"
    )


@pytest.mark.parametrize("name", EXACT)
def test_every_candidate_of_three_workers(name: str, proofs: dict[str, Proof]) -> None:
    done: list[Config] = []
    for each in candidates(proofs[name].step.module, 3, Request()):
        if each.recompute == "saved" and each.pp == 1:
            try:
                proofs[name].prove(each)
            except Diagnostic:
                assert each.tp == 2
            else:
                done.append(each)
    assert {each.tp for each in done} == {1, 3}
