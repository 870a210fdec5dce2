"""A Llama of a size to try things with, and rows of tokens that it can learn: each counts up from its own number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128


def tiny_llama() -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def rows(count: int, length: int = 16) -> Tensor:
    """Token ids (count, length)."""
    return (torch.arange(count).unsqueeze(1) * 7 + torch.arange(length)) % VOCABULARY
