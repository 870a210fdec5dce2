"""Steps of models with a large vocabulary or with experts, the plans for them, and their exactness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moaic.check.proof import TOLERANCE, ProofOutcome, compared
from moaic.ir.graph import Module
from moaic.ir.verify import verify
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import lower
from moaic.passes.transforms.symbolic_zeros import drop_zeros
from moaic.planner.request import parse_request
from moaic.runtime.interpreter import run_function, run_ranks
from tests.exact.example import IGNORED, Batch, Example
from tests.exact.graphs import CapturedStep, captured_step
from tests.exact.models import BALANCED, gpt2, llama, mixtral, qwen2, sizes

ROWS = 8
WIDTH = 16
LENGTH = 32
VOCABULARY = 4096


def tokens(seed: int, rows: int) -> Batch:
    """Random tokens, the last row half padding."""
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, LENGTH // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, IGNORED)}


SIZES = sizes(WIDTH, 24, VOCABULARY, LENGTH)

EXPERTS: dict[str, Any] = {**SIZES, **BALANCED}


def qwen3_moe(**settings: Any) -> nn.Module:
    config: Any = Qwen3MoeConfig
    own = {"moe_intermediate_size": 24, "head_dim": 4, "num_experts": 8}
    return Qwen3MoeForCausalLM(config(**{**EXPERTS, **own, **settings}))


def qwen2_moe() -> nn.Module:
    """One expert that all tokens share beside two of four; nothing balances them."""
    config: Any = Qwen2MoeConfig
    widths = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return Qwen2MoeForCausalLM(config(**{**EXPERTS, **widths, "num_experts": 4, "output_router_logits": False}))


class Proof:
    """A captured step without the tangents that nobody gives, and what the graph says that it computes."""

    def __init__(self, make: Callable[[], nn.Module], draw: Callable[[int, int], Batch] = tokens, rows: int = ROWS):
        step = captured_step(Example(make, lambda seed, _: draw(seed, rows)))
        self.step = without_tangents(step)
        self.builder = Builder(self.step.module)
        self.expected = run_function(self.step.module, self.step.module.main.name, self.step.inputs)

    def prove(self, config: Config) -> Plan:
        """The plan, which computes on virtual ranks what the graph says."""
        plan = self.builder.build(config)
        programs = lower(plan.module, ())
        verify(plan.module)
        verify(programs.joint)
        close(self, run_ranks(programs.joint, [self.step.inputs[i] for i in programs.joint_params]), config)
        return plan


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: llama(**SIZES | {"num_key_value_heads": 4}),
    "qwen2": lambda: qwen2(**SIZES, tie_word_embeddings=True),
    "gpt2": lambda: gpt2(n_embd=WIDTH, vocab_size=VOCABULARY, n_positions=LENGTH),
}
"""In the last two one matrix is both the embedding and the last layer."""

MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: mixtral(**SIZES),
    "qwen2_moe": qwen2_moe,
    "qwen3_moe": qwen3_moe,
}


@cache
def proof(name: str) -> Proof:
    return Proof({**MODELS, **MIXTURES}[name])


def config(text: str) -> Config:
    """`tp=2,micro_batches=2` as a configuration; what is not said is as on one device."""
    asked = parse_request(text)
    given = {field.name: getattr(asked, field.name) for field in fields(asked)}
    return replace(Config(), **{name: value for name, value in given.items() if value is not None})


def without_tangents(step: CapturedStep) -> CapturedStep:
    main = step.module.main
    zero = [i for i, value in enumerate(main.params) if main.param_role(i).kind == "tangent" and value.type.shape != ()]
    module: Module = drop_zeros(step.module, zero)
    return replace(step, module=module)


def close(proof: Proof, results: Sequence[Tensor], config: Config) -> None:
    verdict = compared(config, proof.step.module.main, results, proof.expected, TOLERANCE)
    assert verdict.outcome is ProofOutcome.PASS, f"{config}: {verdict.reason}"
