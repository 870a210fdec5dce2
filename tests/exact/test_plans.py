"""Every candidate plan for 2, 4 and 8 ranks computes what the graph says: lowered, on virtual ranks, in float64."""

from __future__ import annotations

from functools import cache

import pytest

from moaic.check import Fate, Proof, plans_of
from moaic.passes.config import Config
from tests.exact.graphs import captured_step
from tests.exact.models import CONTRAST, DROPOUT, EXAMPLES

MODELS = {**EXAMPLES, "dropout": DROPOUT, "contrast": CONTRAST}


@cache
def proof(name: str) -> Proof:
    return Proof(captured_step(MODELS[name]))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_plan_computes_the_graph(name: str, ranks: int) -> None:
    work = proof(name)
    done: list[Config] = []
    for config in plans_of(work.step.module, ranks):
        verdict = work.verdict(config)
        if verdict.fate is Fate.DROPPED:
            assert may_drop(name, config), verdict
        else:
            assert verdict.fate is Fate.PASS, verdict
            done.append(config)
    assert done


@pytest.mark.parametrize("name", ["resnet", "contrast"])
def test_what_is_made_before_the_first_micro_batch_is_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are dropped for their price alone: nearly all of the forward runs once more, unsplit."""
    monkeypatch.setattr("moaic.passes.follow.PRE_LIMIT", float("inf"))
    work = Proof(captured_step(MODELS[name]))
    configs = [config for config in plans_of(work.step.module, 2) if config.micro_batches > 1]
    for config in configs:
        verdict = work.verdict(config)
        assert verdict.fate is Fate.PASS, verdict
    assert configs


def may_drop(name: str, config: Config) -> bool:
    """What is known to be impossible: fewer heads than tensor-parallel ranks, losses and norms of a whole batch."""
    if name in ("resnet", "contrast"):
        return config.micro_batches > 1
    return config.tp > (2 if name == "qwen2" else 4)
