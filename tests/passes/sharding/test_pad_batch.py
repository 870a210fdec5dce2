"""Batches that do not divide: padded with copies that count nowhere, every plan is exact."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from moaic.ir.op_names import REPEAT_LAST
from moaic.passes.sharding.pad_batch import pad_batch
from tests.exact.models import CONTRAST, DROPOUT, EXAMPLES, MIXTURE
from tests.models.zoo import MODELS
from tests.passes.models import Proof, config

ALL = {**EXAMPLES, "mixtral": MIXTURE, "dropout": DROPOUT, "contrast": CONTRAST, "recurrent": MODELS["recurrent"]}
"""Some in which rows meet (`resnet`, `contrast`), and one in which rows are not outermost (`recurrent`)."""

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


@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "dropout", "recurrent"])
def test_where_rows_do_not_meet_only_the_loss_is_masked(name: str) -> None:
    before = proof(name).step.module.main
    after = pad_batch(proof(name).step.module, ROWS + 1).main
    added = Counter(op.name for op in after.ops)
    added.subtract(op.name for op in before.ops)
    assert added["aten.masked_fill.Scalar"] <= 4
    assert added[REPEAT_LAST] <= 8
    assert not added["aten.mm"]
