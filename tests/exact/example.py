"""A model with its data, as the training tests take them: without transformers, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ROWS = 8
IGNORED = -100

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Example:
    """A model and its data."""

    make: Callable[[], nn.Module]
    """A model with the same weights every time; called with a batch it returns something with a `loss`."""
    draw: Callable[[int, int], Batch]
    """The batch of a seed and a number of rows."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().train()

    def batch(self, seed: int = 0, rows: int = ROWS) -> Batch:
        return self.draw(seed, rows)


@dataclass(frozen=True, slots=True)
class Answer:
    loss: Tensor
    logits: Tensor
