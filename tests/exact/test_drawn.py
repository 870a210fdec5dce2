"""Drawn models under drawn plans, as one program and as two: the result is correct, or an error names the reason."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from moaic.capture.trace_only import take_call
from moaic.check.proof import Proof, ProofOutcome, one_of_each_kind, plans_of, sampled, step_of
from moaic.passes.config import Config
from tests.exact.drawn import BLOCKS, LOSSES, STATISTICS, Drawn, Model, batch

MOST = 3
"""Plans that are drawn for each model and number of devices."""

MODELS = st.builds(
    Drawn,
    blocks=st.lists(st.sampled_from(list(BLOCKS)), max_size=3).map(tuple),
    statistics=st.lists(st.sampled_from(list(STATISTICS)), max_size=2).map(tuple),
    loss=st.sampled_from(list(LOSSES)),
    cheap=st.booleans(),
    layers=st.integers(1, 2),
)


@pytest.fixture(autouse=True)
def conditioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batch norms over few rows carry rounding beyond the usual tolerance; what is wrong is far off."""
    monkeypatch.setattr("moaic.check.proof.TOLERANCE", 1e-8)


@pytest.fixture(autouse=True)
def at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is refused for what it costs to make it early."""
    monkeypatch.setattr("moaic.passes.sharding.data_parallel.EARLY_LIMIT", float("inf"))


def prove(drawn: Drawn, place: float) -> None:
    torch.compiler.reset()
    torch.manual_seed(1)
    proof = Proof(step_of(take_call(Model(drawn), batch())))
    for config in _some(proof, place):
        verdict = proof.verdict(config)
        assert verdict.outcome is not ProofOutcome.FAIL, (str(config), verdict.reason)


def _some(proof: Proof, place: float) -> list[Config]:
    """Plans for two and for four devices, from some place in their order on."""
    found: list[Config] = []
    for ranks in (2, 4):
        plans = one_of_each_kind(plans_of(proof.step.module, ranks))
        start = int(place * len(plans))
        found += sampled([*plans[start:], *plans[:start]], MOST)
    return found


@settings(max_examples=6, derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(MODELS, st.floats(0, 1, exclude_max=True))
@example(Drawn(("gated by a batch",), ("max",), "squares", cheap=True), 0.0)
@example(Drawn((), ("median of columns", "the largest"), "by hand", cheap=True), 0.0)
def test_drawn_models_are_exact(drawn: Drawn, place: float) -> None:
    prove(drawn, place)


@pytest.mark.exact
@pytest.mark.timeout(7200)
@settings(max_examples=1000, database=None, deadline=None)
@given(MODELS, st.floats(0, 1, exclude_max=True))
def test_thousands_of_drawn_cases_are_exact(drawn: Drawn, place: float) -> None:
    """What fails is made small by hypothesis; it then belongs among the examples above."""
    prove(drawn, place)
