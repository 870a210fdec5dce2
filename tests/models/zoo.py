"""Tiny forms of common models, made from their `transformers` configurations, each with a batch.

Rows are ragged, and some labels are -100; all else follows the configuration. A model that is published with dropout
is listed twice: without dropout, and with the published rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from tests.exact.example import Batch, Example

ROWS = 8
LENGTH = 8
WIDTH = 16
WIDER = 32
LAYERS = 2
HEADS = 4
HEAD = WIDTH // HEADS
VOCABULARY = 64
CLASSES = 5
IGNORED = -100

REMOTE = Path(__file__).parents[2] / "tutorial" / "baichuan2"
"""A folder as it would be downloaded: a configuration and the model's own code."""


def text(seed: int = 0, rows: int = ROWS) -> Batch:
    """Rows padded on the right to unequal lengths, their padding left out of the loss."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids, IGNORED),
    }


def masked_text(seed: int = 0, rows: int = ROWS) -> Batch:
    """Some tokens are to be guessed: another number of them in every row."""
    batch = text(seed, rows)
    hidden = (torch.arange(LENGTH) + torch.arange(rows).unsqueeze(1)) % 3 == 0
    return {**batch, "labels": torch.where(hidden, batch["labels"], IGNORED)}


def translation(seed: int = 0, rows: int = ROWS) -> Batch:
    """Sources and targets of unequal lengths."""
    return {**text(seed, rows), "labels": text(seed + 1, rows)["labels"]}


def pictures(seed: int = 0, rows: int = ROWS) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    return {"pixel_values": torch.randn((rows, 3, 8, 8), generator=generator), "labels": labels}


def documents(seed: int = 0, rows: int = ROWS) -> Batch:
    """Two documents in each row, of unequal lengths, that do not see each other: a mask of four dims, of bools."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, LENGTH), generator=generator)
    ends = torch.randint(2, LENGTH - 1, (rows, 1), generator=generator)
    second = torch.arange(LENGTH) >= ends
    seen = (second.unsqueeze(2) == second.unsqueeze(1)) & torch.ones((LENGTH, LENGTH), dtype=torch.bool).tril()
    places = torch.where(second, torch.arange(LENGTH) - ends, torch.arange(LENGTH))
    first_of_second = torch.arange(LENGTH) == ends
    return {
        "input_ids": ids,
        "attention_mask": seen.unsqueeze(1),
        "position_ids": places,
        "labels": torch.where(first_of_second, IGNORED, ids),
    }


def photos(seed: int = 0, rows: int = ROWS) -> Batch:
    """Pictures large enough for five halvings."""
    batch = pictures(seed, rows)
    generator = torch.Generator().manual_seed(seed + 1)
    return {**batch, "pixel_values": torch.randn((rows, 3, 32, 32), generator=generator)}


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": WIDER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": LENGTH,
    "use_cache": False,
}
GROUPED: dict[str, Any] = {**DECODER, "num_key_value_heads": 2}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def both(dropout: float) -> dict[str, Any]:
    """The rates of encoders."""
    return {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}


def made(model: Any, config: Any, **settings: Any) -> nn.Module:
    return model(config(**settings))


def llama(**settings: Any) -> nn.Module:
    return made(hf.LlamaForCausalLM, hf.LlamaConfig, **GROUPED, **settings)


def qwen2() -> nn.Module:
    return made(hf.Qwen2ForCausalLM, hf.Qwen2Config, **GROUPED)


def qwen3() -> nn.Module:
    return made(hf.Qwen3ForCausalLM, hf.Qwen3Config, **GROUPED, head_dim=HEAD)


def mistral() -> nn.Module:
    """Looks back at three tokens."""
    return made(hf.MistralForCausalLM, hf.MistralConfig, **GROUPED, sliding_window=3)


def gemma2() -> nn.Module:
    """Scores and logits under soft caps, every other layer looking back at three tokens."""
    return made(
        hf.Gemma2ForCausalLM, hf.Gemma2Config, **GROUPED, head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=3
    )


def phi3() -> nn.Module:
    return made(hf.Phi3ForCausalLM, hf.Phi3Config, **GROUPED, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def gpt2(dropout: float = 0.0) -> nn.Module:
    """One parameter is both the embedding and the last layer."""
    return made(
        hf.GPT2LMHeadModel,
        hf.GPT2Config,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=LENGTH,
        vocab_size=VOCABULARY,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )


def gpt_neox() -> nn.Module:
    return made(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, **DECODER)


def opt(dropout: float = 0.0) -> nn.Module:
    return made(hf.OPTForCausalLM, hf.OPTConfig, **DECODER, ffn_dim=WIDER, dropout=dropout, word_embed_proj_dim=WIDTH)


def bloom() -> nn.Module:
    """Knows places by linear biases on distance."""
    return made(
        hf.BloomForCausalLM,
        hf.BloomConfig,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
    )


def mixtral() -> nn.Module:
    """Two experts of four for each token, and a loss that balances them."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return made(hf.MixtralForCausalLM, hf.MixtralConfig, **GROUPED, **experts)


def qwen2_moe() -> nn.Module:
    """One expert that all tokens share beside two of four; nothing balances them."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    widths = {"moe_intermediate_size": WIDTH, "shared_expert_intermediate_size": WIDTH}
    return made(hf.Qwen2MoeForCausalLM, hf.Qwen2MoeConfig, **GROUPED, **experts, **widths)


def bert(dropout: float = 0.0) -> nn.Module:
    return made(hf.BertForMaskedLM, hf.BertConfig, **DECODER, **both(dropout))


def t5(dropout: float = 0.0, layers: int = LAYERS) -> nn.Module:
    return made(
        hf.T5ForConditionalGeneration,
        hf.T5Config,
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=HEAD,
        d_ff=WIDER,
        num_layers=layers,
        num_heads=HEADS,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )


def vit(dropout: float = 0.0) -> nn.Module:
    return made(
        hf.ViTForImageClassification,
        hf.ViTConfig,
        hidden_size=WIDTH,
        intermediate_size=WIDER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=8,
        patch_size=4,
        num_labels=CLASSES,
        **both(dropout),
    )


def bigcode(dropout: float = 0.0) -> nn.Module:
    """All heads of queries share one of keys and values."""
    return made(
        hf.GPTBigCodeForCausalLM,
        hf.GPTBigCodeConfig,
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=WIDER,
        n_positions=LENGTH,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        **TOKENS,
    )


def falcon() -> nn.Module:
    """One head of keys and values, attention and feed-forward side by side."""
    return made(hf.FalconForCausalLM, hf.FalconConfig, **DECODER, multi_query=True, **TOKENS)


def deepseek_v3() -> nn.Module:
    """Values of another width than keys; one layer of four experts and one that all share."""
    ranks = {"q_lora_rank": WIDTH, "kv_lora_rank": WIDTH}
    widths = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 8, "moe_intermediate_size": WIDTH}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    own = {**DECODER, **ranks, **widths, **experts, "first_k_dense_replace": 1, "num_key_value_heads": HEADS}
    return made(hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, **own, **TOKENS)


def resnet() -> nn.Module:
    """Eighteen layers, few channels."""
    return made(
        hf.ResNetForImageClassification,
        hf.ResNetConfig,
        embedding_size=8,
        hidden_sizes=[8, 8, 16, 16],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=CLASSES,
    )


def remote() -> nn.Module:
    """A model of nobody's: its code is beside its configuration."""
    configs: Any = hf.AutoConfig
    models: Any = hf.AutoModelForCausalLM
    settings = {**DECODER, "intermediate_size": WIDER, "z_loss_weight": 0.1, "dtype": "float32"}
    config = configs.from_pretrained(REMOTE, trust_remote_code=True, **settings)
    return models.from_config(config, trust_remote_code=True)


class Recurrent(nn.Module):
    """A language model of before attention: embeddings, LSTM layers, GRU layers in both directions, and logits."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=LAYERS, dropout=dropout, batch_first=True)
        self.gru = nn.GRU(WIDTH, WIDER, bidirectional=True)
        self.logits = nn.Linear(2 * WIDER, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        below, _ = self.lstm(self.embedding(input_ids))
        out, last = self.gru((below * attention_mask.unsqueeze(2)).transpose(0, 1))
        logits = self.logits(out.transpose(0, 1) + torch.cat(last.unbind(0), 1).unsqueeze(1))
        output: Any = CausalLMOutput
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        return output(loss=loss, logits=logits)


RATE = 0.1
"""What those who published these models dropped."""


def dropping(rate: float) -> dict[str, Example]:
    """Models that are published with dropout, which is then everywhere where they have it."""
    return {
        "gpt2_dropout": Example(partial(gpt2, rate), text),
        "opt_dropout": Example(partial(opt, rate), text),
        "bert_dropout": Example(partial(bert, rate), masked_text),
        "t5_dropout": Example(partial(t5, rate), translation),
        "vit_dropout": Example(partial(vit, rate), pictures),
        "bigcode_dropout": Example(partial(bigcode, rate), text),
        "recurrent_dropout": Example(partial(Recurrent, rate), text),
        "llama_documents_dropout": Example(partial(llama, attention_dropout=rate), documents),
    }


DROPPING: Mapping[str, Example] = dropping(RATE)

MODELS: Mapping[str, Example] = {
    "llama": Example(llama, text),
    "qwen2": Example(qwen2, text),
    "qwen3": Example(qwen3, text),
    "mistral": Example(mistral, text),
    "gemma2": Example(gemma2, text),
    "phi3": Example(phi3, text),
    "gpt2": Example(gpt2, text),
    "gpt_neox": Example(gpt_neox, text),
    "opt": Example(opt, text),
    "bloom": Example(bloom, text),
    "mixtral": Example(mixtral, text),
    "qwen2_moe": Example(qwen2_moe, text),
    "bert": Example(bert, masked_text),
    "t5": Example(t5, translation),
    "vit": Example(vit, pictures),
    "resnet": Example(resnet, photos),
    "remote": Example(remote, text),
    "falcon": Example(falcon, text),
    "deepseek_v3": Example(deepseek_v3, text),
    "recurrent": Example(Recurrent, text),
    "llama_documents": Example(llama, documents),
    **DROPPING,
}
