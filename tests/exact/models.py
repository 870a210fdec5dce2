"""The models of the training tests: tiny, with data that can be learned and rows of unequal length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from tests.exact.example import IGNORED, Answer, Batch, Example

LENGTH = 12
VOCABULARY = 40
CLASSES = 5


def text(seed: int, rows: int) -> Batch:
    """Rows that count in steps of their own, padded on the right to unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(1, VOCABULARY, (rows, 1), generator=generator)
    step = torch.randint(1, 4, (rows, 1), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = (start + step * torch.arange(LENGTH)) % VOCABULARY
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids, IGNORED),
    }


def pictures(seed: int, rows: int) -> Batch:
    """Noise over one bright spot, whose place is the label."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    pixels = torch.randn((rows, 3, 8, 8), generator=generator)
    for row in range(rows):
        place = int(labels[row])
        pixels[row, :, place, place] += 4
    return {"pixel_values": pixels, "labels": labels}


def sizes(width: int = 32, inner: int = 48, vocabulary: int = VOCABULARY, length: int = LENGTH) -> dict[str, Any]:
    """What configurations of two layers with four heads have in common."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
        "use_cache": False,
    }


def llama(**settings: Any) -> nn.Module:
    config: Any = LlamaConfig
    return LlamaForCausalLM(config(**{**sizes(), "num_key_value_heads": 4, **settings}))


def qwen2(**settings: Any) -> nn.Module:
    """Two heads of queries for each of keys and values, and biases in the attention."""
    config: Any = Qwen2Config
    return Qwen2ForCausalLM(config(**{**sizes(), **settings}))


BALANCED: Mapping[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
"""Two experts for each token, and a loss that balances them."""


def mixtral(**settings: Any) -> nn.Module:
    config: Any = MixtralConfig
    return MixtralForCausalLM(config(**{**sizes(), **BALANCED, "num_local_experts": 4, **settings}))


def gpt2(dropout: float = 0.0, **settings: Any) -> nn.Module:
    """One parameter is both the embedding and the last layer."""
    own: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    never: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(**{**own, **never, **ends, **settings}))
    # Asked for the default loss by name, it does not warn that it takes the default: a warning would break the graph.
    model.loss_type = "ForCausalLM"
    return model


def vit() -> nn.Module:
    settings: Any = ViTConfig
    return ViTForImageClassification(
        settings(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=8,
            patch_size=2,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Block(nn.Module):
    """Two convolutions around which the input flows on."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outside)
        self.around = nn.Conv2d(inside, outside, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.around(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Answer:
        features: Tensor = self.blocks(torch.relu(self.stem(pixel_values)))
        logits: Tensor = self.head(features.mean((2, 3)))
        return Answer(cross_entropy(logits, labels), logits)


class Contrast(nn.Module):
    """Each row is told from all others; a penalty on the parameters, noise on one of them, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(3 * 64, 10)
        self.norm = nn.LayerNorm(10)
        self.dropout = nn.Dropout(0.3)
        self.outside = nn.Linear(10, 4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Answer:
        hidden: Tensor = self.dropout(torch.relu(self.norm(self.inside(pixel_values.flatten(1)))))
        logits: Tensor = self.outside(hidden)
        loss = cross_entropy(logits @ logits.T, labels) + cross_entropy(logits, labels % 4, label_smoothing=0.1)
        penalty = torch.stack([parameter.square().sum() for parameter in self.parameters()]).sum()
        noise = (torch.rand_like(self.outside.weight) * self.outside.weight).sum()
        return Answer(loss + 0.1 * penalty + noise * loss.detach() + hidden.mean(0).square().sum(), logits)


EXAMPLES: Mapping[str, Example] = {
    "llama": Example(llama, text),
    "qwen2": Example(qwen2, text),
    "gpt2": Example(gpt2, text),
    "vit": Example(vit, pictures),
    "resnet": Example(ResNet, pictures),
}

MIXTURE = Example(mixtral, text)

DROPOUT = Example(lambda: gpt2(0.1), text)

CONTRAST = Example(Contrast, pictures)
