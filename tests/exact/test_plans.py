"""Plans for 1 to 8 ranks give the values of the graph: lowered, on virtual ranks, in float64. `make exact` runs all."""

from __future__ import annotations

from functools import cache

import pytest

from moaic.check.proof import Proof, ProofOutcome, plans_of, sampled
from moaic.passes.config import Config
from tests.exact.graphs import captured_step
from tests.exact.models import CONTRAST, DROPOUT, EXAMPLES

MODELS = {**EXAMPLES, "dropout": DROPOUT, "contrast": CONTRAST}


MOST = {1: 4, 2: 8, 4: 4, 8: 2}
"""Candidates of the Llama that are run for so many ranks; of the others half as many."""


@cache
def proof(name: str) -> Proof:
    return Proof(captured_step(MODELS[name]))


@pytest.mark.parametrize("ranks", MOST)
@pytest.mark.parametrize("name", MODELS)
def test_plans_compute_the_graph(name: str, ranks: int) -> None:
    work = proof(name)
    done: list[Config] = []
    most = MOST[ranks] if name == "llama" else MOST[ranks] // 2
    for config in sampled(plans_of(work.step.module, ranks), most):
        verdict = work.verdict(config)
        if verdict.outcome is ProofOutcome.DROPPED:
            assert may_drop(name, config), verdict
        else:
            assert verdict.outcome is ProofOutcome.PASS, verdict
            done.append(config)
    assert done


@pytest.mark.parametrize("name", [pytest.param("resnet", marks=pytest.mark.exact), "contrast"])
def test_what_is_made_before_the_first_micro_batch_is_exact_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that are dropped for their price alone: nearly all of the forward runs once more, unsplit."""
    monkeypatch.setattr("moaic.passes.sharding.data_parallel.EARLY_LIMIT", float("inf"))
    work = Proof(captured_step(MODELS[name]))
    configs = [config for config in plans_of(work.step.module, 2) if config.micro_batches > 1]
    for config in configs:
        verdict = work.verdict(config)
        assert verdict.outcome is ProofOutcome.PASS, verdict
    assert configs


def may_drop(name: str, config: Config) -> bool:
    """What is known to be impossible: fewer heads than tensor-parallel ranks, losses and norms of a whole batch."""
    if name in ("resnet", "contrast"):
        return config.micro_batches > 1
    return config.tp > (2 if name == "qwen2" else 4)
