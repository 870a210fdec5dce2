"""The configuration of Baichuan 2 13B and of smaller models like it."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class BaichuanConfig(PretrainedConfig):
    """Sizes, and the weight of the penalty on large logits."""

    model_type = "baichuan"

    def __init__(
        self,
        vocab_size: int = 125696,
        hidden_size: int = 5120,
        intermediate_size: int = 13696,
        num_hidden_layers: int = 40,
        num_attention_heads: int = 40,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        z_loss_weight: float = 0.0,
        use_cache: bool = False,
        **rest: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.z_loss_weight = z_loss_weight
        self.use_cache = use_cache
        super().__init__(**rest)
