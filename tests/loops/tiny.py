"""A model small enough for all variants of optimizers, with an embedding, a norm, matrix products and a loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

from tests.exact.example import IGNORED, Answer, Batch, Example

WORDS = 24
ROWS = 8
LENGTH = 6


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.head = nn.Linear(16, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Answer:
        x: Tensor = self.embed(ids)
        x = x + self.down(gelu(self.up(self.norm(x))))
        logits: Tensor = self.head(x)
        loss = logits.sum() if labels is None else loss_of(logits, labels)
        return Answer(loss, logits)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def draw(seed: int, rows: int) -> Batch:
    """Each word tells the next; the rest of some rows does not count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (rows, 1), generator=generator)
    return {"ids": ids, "labels": torch.where(torch.arange(LENGTH) < lengths, (ids * 5 + 1) % WORDS, IGNORED)}


TINY = Example(Tiny, draw)
