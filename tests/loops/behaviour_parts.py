"""What the behaviours share: an optimizer, the gradients, the loss of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from tests.exact.training import Call
from tests.loops.tiny import TINY

lists: Any = torch
"""Where torch keeps its ops on lists of tensors."""


def device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


def adamw(model: nn.Module, **options: Any) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2, eps=1e-4, **options)


def present(model: nn.Module) -> list[Tensor]:
    """The gradients themselves."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def loss_at(call: Call, seed: int) -> Tensor:
    return call(**TINY.batch(seed)).loss
