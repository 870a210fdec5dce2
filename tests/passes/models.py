"""Steps of models with a large vocabulary or with experts: what plans for them are, and that they are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moaic.ir.graph import Module
from moaic.ir.verify import verify
from moaic.passes.build import Builder, Plan
from moaic.passes.config import Config, parse_request
from moaic.passes.zero import drop_zeros
from moaic.runtime.interpreter import run_function, run_ranks
from tests.exact.graphs import Step, captured_step
from tests.exact.models import IGNORED, Batch, Example

ROWS = 8
WIDTH = 16
LENGTH = 32
VOCABULARY = 4096
TOLERANCE = 1e-10


def tokens(seed: int, rows: int) -> Batch:
    """Random tokens, the last row half padding."""
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, LENGTH // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, IGNORED)}


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )


def qwen2() -> nn.Module:
    """One matrix is both the embedding and the last layer."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            tie_word_embeddings=True,
            use_cache=False,
        )
    )


def gpt2() -> nn.Module:
    model = GPT2LMHeadModel(
        GPT2Config(
            n_embd=WIDTH,
            n_layer=2,
            n_head=4,
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )
    model.loss_type = "ForCausalLM"
    return model


EXPERTS: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
"""Two experts for each token, and a loss that balances them."""


def mixtral(**settings: object) -> nn.Module:
    config: Any = MixtralConfig
    return MixtralForCausalLM(config(**EXPERTS, intermediate_size=24, num_local_experts=4, **settings))


def qwen3_moe(**settings: object) -> nn.Module:
    config: Any = Qwen3MoeConfig
    return Qwen3MoeForCausalLM(config(**EXPERTS, moe_intermediate_size=24, head_dim=4, num_experts=8, **settings))


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
        joint = plan.programs.joint
        verify(plan.module)
        verify(joint)
        close(self, run_ranks(joint, [self.step.inputs[i] for i in plan.programs.joint_params]), config)
        return plan


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "qwen2": qwen2, "gpt2": gpt2}

MIXTURES: dict[str, Callable[[], nn.Module]] = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe}


@cache
def proof(name: str) -> Proof:
    return Proof({**MODELS, **MIXTURES}[name])


def config(text: str) -> Config:
    """`tp=2,micro_batches=2` as a configuration; what is not said is as on one device."""
    asked = parse_request(text)
    given = {field.name: getattr(asked, field.name) for field in fields(asked)}
    return replace(Config(), **{name: value for name, value in given.items() if value is not None})


def without_tangents(step: Step) -> Step:
    main = step.module.main
    zero = [i for i, value in enumerate(main.params) if main.param_role(i).kind == "tangent" and value.type.shape != ()]
    module: Module = drop_zeros(step.module, zero)
    return replace(step, module=module)


def close(proof: Proof, results: Sequence[Tensor], config: Config) -> None:
    main = proof.step.module.main
    floor = 1e-3 * max(wanted.abs().max().item() for wanted in proof.expected)
    for index, (result, wanted) in enumerate(zip(results, proof.expected, strict=True)):
        distance = (result - wanted).abs().max().item() / max(wanted.abs().max().item(), floor)
        assert distance <= TOLERANCE, f"{config}: {main.result_role(index)} is off by {distance:.1e}"
