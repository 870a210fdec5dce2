"""The configuration of a decoder with linear biases on distance."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig


class AlibiConfig(PretrainedConfig):
    """Sizes, and the weight of the penalty on large logits."""

    model_type = "alibi_decoder"

    def __init__(
        self,
        vocab_size: int = 64,
        hidden_size: int = 16,
        intermediate_size: int = 32,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
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
