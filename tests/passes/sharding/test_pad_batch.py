"""Batches that do not divide: padded with copies that count nowhere, every plan is exact."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from moaic.ir.errors import Diagnostic
from moaic.ir.op_names import REPEAT_LAST
from moaic.passes.sharding.pad_batch import pad_batch
from tests.exact.example import Answer, Batch, Example
from tests.exact.models import CONTRAST, DROPOUT, EXAMPLES, MIXTURE
from tests.models.zoo import MODELS
from tests.passes.models import Proof, config


class Mixed(nn.Module):
    """Rows are looked up by numbers that are rows, too."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor, order: Tensor) -> Answer:
        below = self.below(x)
        logits: Tensor = self.head((0.3 * below + 0.7 * below[order]).relu())
        return Answer(nn.functional.cross_entropy(logits, order % 4), logits)


class Gated(nn.Module):
    """Sums over rows are infinite by their last one, and gates are one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))

    def forward(self, x: Tensor, order: Tensor) -> Answer:
        gate = torch.sigmoid((x.abs() + 1).T @ (1 / order.unsqueeze(1).expand(-1, 6)))
        return Answer((gate * self.weight).square().sum(), gate)


class Halved(nn.Module):
    """Rows meet before all else."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(6, 5)

    def forward(self, x: Tensor, order: Tensor) -> Answer:
        one, other = x.chunk(2)
        logits: Tensor = self.below(one) - self.below(other)
        return Answer(logits.square().sum(), logits)


def numbered(seed: int, rows: int) -> Batch:
    """Rows of numbers, and their places in falling order."""
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, generator=generator), "order": torch.arange(rows).flip(0)}


ALL = {
    **EXAMPLES,
    "mixtral": MIXTURE,
    "dropout": DROPOUT,
    "contrast": CONTRAST,
    "recurrent": MODELS["recurrent"],
    "mixed": Example(Mixed, numbered),
    "gated": Example(Gated, numbered),
}
"""Some in which rows meet (`resnet`, `contrast`, `mixed`), and one with rows not outermost (`recurrent`)."""

ROWS = 8

ASKED = [
    *((name, "dp=3") for name in ALL),
    *(("gpt2", asked) for asked in ("micro_batches=3", "pp=2,micro_batches=3", "dp=5,distribute_param=use")),
    *(("llama", asked) for asked in ("dp=3,micro_batches=2,recompute=full", "dp=3,tp=2", "dp=3,cp=2")),
    *(("dropout", asked) for asked in ("micro_batches=3", "dp=3,micro_batches=2")),
    *(("mixtral", asked) for asked in ("dp=3,ep=2", "micro_batches=3")),
    ("recurrent", "micro_batches=3"),
]


@cache
def proof(name: str) -> Proof:
    return Proof(ALL[name].make, ALL[name].draw, ROWS)


@pytest.mark.parametrize(("name", "asked"), ASKED)
def test_a_batch_that_does_not_divide_is_exact(name: str, asked: str) -> None:
    proof(name).prove(config(asked))


def test_a_batch_whose_rows_are_told_apart_at_once_is_not_padded() -> None:
    halved = Proof(Halved, numbered, ROWS)
    with pytest.raises(Diagnostic, match="a batch of 8 is not padded to 9 rows"):
        halved.prove(config("dp=3"))
    halved.prove(config("dp=2"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "dropout", "recurrent"])
def test_where_rows_do_not_meet_only_the_loss_is_masked(name: str) -> None:
    before = proof(name).step.module.main
    after = pad_batch(proof(name).step.module, ROWS + 1).main
    added = Counter(op.name for op in after.ops)
    added.subtract(op.name for op in before.ops)
    assert added["aten.masked_fill.Scalar"] <= 4
    assert added[REPEAT_LAST] <= 8
    assert not added["aten.mm"]
