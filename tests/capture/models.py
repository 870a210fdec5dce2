"""Small models of common architectures, each with a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED: dict[str, Any] = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "use_cache": False}


def text(batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Padded sequences."""
    ids = torch.randint(0, 64, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def unpadded() -> dict[str, Tensor]:
    """Without a mask attention is a flag, and several heads of queries may share one of keys."""
    padded = text()
    return {"input_ids": padded["input_ids"], "labels": padded["input_ids"]}


def pictures(size: int = 16) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.randint(0, 5, (4,))}


def llama(**changes: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, **changes}))


def qwen2() -> nn.Module:
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED))


def mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=6))


def gpt2(dropout: float = 0.0) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    drops: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **drops, use_cache=False))
    model.loss_type = "ForCausalLM"
    return model


NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert() -> nn.Module:
    return hf.BertForMaskedLM(hf.BertConfig(**SMALL, **NO_DROPOUT, intermediate_size=48, max_position_embeddings=16))


def vit() -> nn.Module:
    sizes: dict[str, Any] = {**SMALL, "intermediate_size": 48, "image_size": 16, "patch_size": 4, "num_labels": 5}
    del sizes["vocab_size"]
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **NO_DROPOUT))


class ResNet(nn.Module):
    """Strides, a shortcut, batch and group norms, a bias where it matters, pooling, label smoothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1))
        self.shortcut = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.stem(pixel_values)
        x = torch.relu(self.norm(self.body(x) + self.shortcut(x)))
        logits = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        loss = nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
        return {"loss": loss, "logits": logits}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "llama": (llama, text),
    "llama_without_padding": (llama, unpadded),
    "llama_with_a_cache": (lambda: llama(use_cache=True), unpadded),
    "llama_eager_attention": (lambda: llama(attn_implementation="eager"), text),
    "qwen2": (qwen2, text),
    "mistral": (mistral, text),
    "gpt2": (gpt2, text),
    "bert": (bert, text),
    "vit": (vit, pictures),
    "resnet": (ResNet, pictures),
}
