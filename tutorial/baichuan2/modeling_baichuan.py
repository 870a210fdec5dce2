"""Baichuan 2 as of 13B: linear biases on distance, packed projections, a normalized output head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, silu
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_baichuan import BaichuanConfig  # noqa: TID252 (it is loaded under a name that nobody knows here)


def slopes(heads: int) -> list[float]:
    """How fast each head forgets: a geometric series, and every other term of the next one for the rest."""
    whole = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
    second = [2 ** (-4 * (i + 1) / whole) for i in range(0, 2 * (heads - whole), 2)]
    return first + second


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.epsilon)).to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.width = config.hidden_size // self.heads
        self.W_pack = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        rows, length, _ = x.shape
        packed = self.W_pack(x).unflatten(-1, (3, -1)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        query, key, value = (part.view(rows, length, self.heads, self.width).transpose(1, 2) for part in packed)
        scores = query @ key.transpose(2, 3) / math.sqrt(self.width) + bias
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min, device=scores.device))
        weights = torch.softmax(scores, -1)
        return self.o_proj((weights @ value).transpose(1, 2).reshape(rows, length, -1))


class MLP(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), bias)
        return x + self.mlp(self.post_attention_layernorm(x))


class NormHead(nn.Module):
    """Logits are angles: each token's row has length one."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, normalize(self.weight))


class BaichuanPreTrainedModel(PreTrainedModel):
    config_class = BaichuanConfig
    base_model_prefix = "model"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(std=self.config.initializer_range)


class BaichuanModel(BaichuanPreTrainedModel):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        bias = self.bias(input_ids.shape[1], x.dtype, x.device)
        lowest = torch.finfo(x.dtype).min
        bias = bias + torch.where(attention_mask[:, None, None, :].bool(), 0.0, lowest).to(x.dtype)
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)

    def bias(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Per head, less for what is farther back and nothing for what is ahead."""
        slope = torch.tensor(slopes(self.config.num_attention_heads), dtype=dtype, device=device)
        distance = torch.arange(length, device=device)[None, :] - torch.arange(length, device=device)[:, None]
        ahead = torch.triu(torch.full((length, length), float("-inf"), dtype=dtype, device=device), 1)
        return slope[:, None, None] * distance.to(dtype) + ahead


class BaichuanForCausalLM(BaichuanPreTrainedModel):
    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = BaichuanModel(config)
        self.lm_head = NormHead(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None, use_cache: bool = False
    ) -> CausalLMOutputWithPast:
        if use_cache:
            raise ValueError("this Baichuan 2 is for training and keeps no cache; pass use_cache=False")
        logits = self.lm_head(self.model(input_ids, attention_mask)).float()
        loss = None
        if labels is not None:
            ahead, wanted = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            penalty = self.config.z_loss_weight * ahead.max(-1).values.square().mean()
            loss = cross_entropy(ahead, wanted) + penalty
        return CausalLMOutputWithPast(loss=loss, logits=logits)
