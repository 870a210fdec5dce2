"""A small Llama in eight-bit floats, by torchao on the host and on workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from moaic.capture.float8 import float8_linear
from tests.exact.example import Batch
from tests.exact.training import PLANS, compiled

RECIPES: Mapping[str, str] = {
    "float8": "rowwise_with_gw_hp",
    "float8_rowwise": "rowwise",
    "float8_tensorwise": "tensorwise",
}
"""By precision, what torchao calls it."""

LOSS, GRADIENT = 1e-3, 0.2
"""Distances from torchao's layers on the host. Three bits of mantissa: what bfloat16 rounds otherwise falls on the next
of these numbers, a sixteenth away."""

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


def llama(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).train()


def batch() -> Batch:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def in_float8_here(model: Any, recipe: str) -> Any:
    """The model with torchao's layers in the place of its own, but for the last, on the host."""

    def narrow(layer: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: float8_linear(x, layer.weight, layer.bias, recipe)

    for name, layer in model.named_modules():
        if type(layer) is nn.Linear and name != "lm_head":
            vars(layer)["forward"] = narrow(layer)
    return model


def is_computed_here(precision: str) -> bool:
    """Whether PyTorch computes torchao's layers on CPUs: the oldest does so where a matrix has one scale."""
    return precision == "float8_tensorwise" or torch.__version__ >= "2.12"


def beside_torchao(precision: str, plan: str) -> None:
    """Raises AssertionError unless loss and gradients are those of torchao's layers, as far as eight bits can say."""
    torch.compiler.reset()
    model, host = llama().to("moai"), in_float8_here(llama(), RECIPES[precision])
    call = compiled(model, PLANS[plan], precision=precision)
    loss = call(**batch()).loss
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        expected = host(**batch()).loss
    expected.backward()
    assert abs(loss.item() - expected.item()) <= LOSS * expected.item()
    wanted = dict(host.named_parameters())
    for name, parameter in model.named_parameters():
        grad, other = parameter.grad, wanted[name].grad
        assert grad is not None
        assert other is not None
        assert grad.dtype == torch.float32
        assert (grad.cpu() - other).norm() <= GRADIENT * other.norm(), name
