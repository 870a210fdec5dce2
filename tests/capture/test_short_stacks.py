"""Models that are captured with few of their layers: the same step as with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moaic.capture import trace_only
from moaic.capture.short_stacks import Cut, shortened
from moaic.capture.trace_only import CapturedCall, ModelSource, Sample
from moaic.ir.graph import Module, Role
from moaic.ir.printer import render
from moaic.passes.perf.structural_hash import key_of
from moaic.passes.registry import run_passes
from moaic.passes.transforms.outline import outline
from moaic.predict import captured_step as capturing
from moaic.predict.captured_step import captured_step

SMALL: Mapping[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
TINY: Mapping[str, Any] = {**SMALL, "vocab_size": 64}
GROUPED: Mapping[str, Any] = {**TINY, "num_key_value_heads": 2}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "vocab_size": 64}

GPT2: Mapping[str, Any] = {"n_layer": 8, "n_embd": 16, "n_head": 4, "vocab_size": 64}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {**GROUPED, "num_hidden_layers": 9},
    "qwen2": {
        **GROUPED,
        "num_hidden_layers": 9,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 8,
    },
    "gemma2": {**GROUPED, "num_hidden_layers": 17, "head_dim": 8, "sliding_window": 8},
    "t5": {"num_layers": 9, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4, "vocab_size": 64},
    "bart": {"encoder_layers": 8, "decoder_layers": 9, "d_model": 16, "vocab_size": 64},
    "vit": {**SMALL, "num_hidden_layers": 8, "image_size": 32, "patch_size": 8},
    "gemma3_text": {**GROUPED, "num_hidden_layers": 50, "head_dim": 8, "sliding_window": 8},
    "gpt_oss": {**GROUPED, **EXPERTS, "num_hidden_layers": 16, "head_dim": 4, "num_local_experts": 4},
    "qwen3_moe": {**GROUPED, **EXPERTS, "num_hidden_layers": 8, "moe_intermediate_size": 16, "num_experts": 4},
    "deepseek_v3": {
        **TINY,
        **EXPERTS,
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "qk_nope_head_dim": 4,
    },
}


def steps(model: str, settings: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Module, Module]:
    """The step as it is captured, and as it is captured with all layers."""

    def whole(source: ModelSource, sample: Sample) -> CapturedCall:
        raise AssertionError("the whole model is captured, though few layers of it would do")

    source, sample = ModelSource(model, settings), Sample(4, 16)
    with monkeypatch.context() as patched:
        patched.setattr(capturing, "take_model", whole)
        found = captured_step(source, sample)
    with monkeypatch.context() as patched:
        patched.setattr(capturing, "take_short_model", _no_layers_out)
        return found, captured_step(source, sample)


def _no_layers_out(source: ModelSource, sample: Sample, units: int) -> tuple[CapturedCall, tuple[Cut, ...]]:
    return trace_only.take_model(source, sample), ()


def test_a_step_of_few_layers_made_deep_is_that_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    found, whole = steps("gpt2", GPT2, monkeypatch)
    assert render(found) == render(whole)


@pytest.mark.exact
@pytest.mark.parametrize("model", MODELS)
def test_so_is_that_of_other_models(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, whole = steps(model, MODELS[model], monkeypatch)
    assert [key_of(each) for each in outline(found).functions] == [key_of(each) for each in outline(whole).functions]
    assert signature(found) == signature(whole)


def signature(step: Module) -> list[Role]:
    """The roles of parameters and results; Dynamo numbers outputs that have no name of their own."""
    roles = (*step.main.param_roles, *step.main.result_roles)
    return [role if role.kind in ("param", "buffer", "grad") else Role(role.kind) for role in roles]


def test_layers_scaled_by_their_number_are_all_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**GPT2, "scale_attn_by_inverse_layer_idx": True, "resid_pdrop": 0.0}
    ops = captured_step(ModelSource("gpt2", settings), Sample(2, 8)).main.ops
    factors = {op.attrs.get("other") for op in ops if op.loc.module.endswith(".attn")}
    assert len(factors) >= 8


CONFIG = """{"model_type": "counting", "form": "plain", "vocab_size": 32, "auto_map": {
  "AutoConfig": "counting.CountingConfig", "AutoModelForCausalLM": "counting.CountingForCausalLM"}}"""

CODE = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class CountingConfig(PretrainedConfig):
    model_type = "counting"

    def __init__(self, form="plain", vocab_size=32, **others):
        self.form, self.vocab_size = form, vocab_size
        super().__init__(**others)


class Layer(nn.Module):
    def __init__(self, number, form):
        super().__init__()
        self.number, self.form, self.linear = number, form, nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x).relu()
        return x + (2 * y if self.form == "from the seventh on" and self.number >= 6 else y)


class CountingForCausalLM(PreTrainedModel):
    config_class = CountingConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.head = nn.Embedding(config.vocab_size, 8), nn.Linear(8, config.vocab_size)
        self.layers = nn.ModuleList(Layer(number, config.form) for number in range(12))
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None):
        x = self.embedding(input_ids)
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        if self.config.form == "by the depth":
            x = x / len(self.layers)
        if self.config.form == "from below":
            x = x + states[3]
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss}
"""


@pytest.mark.parametrize("form", ["plain", "by the depth", "from below", "from the seventh on"])
def test_a_model_that_counts_its_layers_has_all_of_them_captured(form: str, tmp_path: Path) -> None:
    """Four layers of it have the same form: only a fifth shows that it divides by their number, or reads the fourth."""
    (tmp_path / "config.json").write_text(CONFIG, encoding="utf-8")
    (tmp_path / "counting.py").write_text(CODE, encoding="utf-8")
    source, sample = ModelSource(str(tmp_path), {"form": form}, trust_remote_code=True), Sample(2, 8)
    whole = run_passes(Module((trace_only.take_model(source, sample).captured.function,)), "zero")
    assert render(captured_step(source, sample)) == render(whole)


class Block(nn.Module):
    def __init__(self, number: int, rate: float) -> None:
        super().__init__()
        self.number = number
        self.rate = rate
        self.linear = nn.Linear(4, 4)


def test_layers_that_are_left_out_come_back() -> None:
    blocks = [Block(number, 0.1) for number in range(12)]
    layers = nn.ModuleList(blocks)
    with shortened(nn.ModuleDict({"head": nn.Sequential(Block(0, 0.5)), "layers": layers}), 4) as cuts:
        assert cuts == [Cut("layers", 8)]
        assert [*layers] == [*blocks[:2], *blocks[-2:]]
    assert [*layers] == blocks
    assert [name for name, _ in layers.named_children()] == [str(number) for number in range(12)]


def with_attribute(block: Block, value: Any) -> Block:
    block.attribute = value
    return block


def hooked(block: Block) -> Block:
    block.register_forward_hook(unchanged)
    return block


def unchanged(module: nn.Module, arguments: object, result: object) -> None:
    """A hook that does nothing."""


def tied(blocks: list[Block]) -> list[Block]:
    for block in blocks[6:]:
        block.linear = blocks[5].linear
    return blocks


def frozen(block: Block) -> Block:
    return block.requires_grad_(False)


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(number, number / 20) for number in range(12)],
        [Block(number, 0.1) for number in range(7)],
        [Block(number // 3, 0.1) for number in range(24)],
        [Block(number, 0.1) if number < 11 else hooked(Block(number, 0.1)) for number in range(12)],
        [Block(number, 0.1) if number < 10 else frozen(Block(number, 0.1)) for number in range(20)],
        [with_attribute(Block(number, 0.1), {"act": [torch.relu, torch.tanh][number % 5 > 3]}) for number in range(12)],
        tied([Block(number, 0.1) for number in range(12)]),
    ],
    ids=[
        "another rate in each",
        "few",
        "numbers that do not count",
        "a hook",
        "others above",
        "functions",
        "shared parameters",
    ],
)
def test_layers_that_differ_stay(blocks: list[nn.Module]) -> None:
    with shortened(nn.ModuleDict({"layers": nn.ModuleList(blocks)}), 4) as cuts:
        assert cuts == []


def test_frozen_layers_stay_apart_from_others() -> None:
    blocks = [frozen(Block(number, 0.1)) if number < 3 else Block(number, 0.1) for number in range(20)]
    with shortened(nn.ModuleDict({"layers": nn.ModuleList(blocks)}), 4) as cuts:
        assert cuts == [Cut("layers", 13)]
