"""Each model captured once, on the device, in its usual training step.

The number of exact (model, plan) pairs is printed at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from moaic.capture.trace_only import CapturedCall, take_call
from moaic.check.proof import Proof, ProofOutcome, Verdict, step_of
from tests.models.zoo import MODELS


@dataclass
class Zoo:
    """Models as captured, their proofs, and the pairs that passed so far."""

    taken: dict[str, CapturedCall] = field(default_factory=dict[str, CapturedCall])
    proofs: dict[str, Proof] = field(default_factory=dict[str, Proof])
    passed: set[tuple[str, str, bool]] = field(default_factory=set[tuple[str, str, bool]])
    """Model, plan, and whether it ran on workers."""

    def take(self, name: str) -> CapturedCall:
        """On the host other ops would be captured: what attention falls apart into is the device's own business."""
        if name not in self.taken:
            torch.compiler.reset()
            batch = {key: tensor.to("moai") for key, tensor in MODELS[name].batch().items()}
            self.taken[name] = take_call(MODELS[name].model().to("moai"), batch)
        return self.taken[name]

    def proof(self, name: str) -> Proof:
        if name not in self.proofs:
            self.proofs[name] = Proof(step_of(self.take(name)))
        return self.proofs[name]

    def count(self, name: str, verdict: Verdict, *, on_workers: bool = False) -> None:
        if verdict.outcome is ProofOutcome.PASS:
            self.passed.add((name, str(verdict.config), on_workers))

    def pairs(self, *, on_workers: bool) -> int:
        return sum(where == on_workers for _, _, where in self.passed)


ZOO = pytest.StashKey[Zoo]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ZOO] = Zoo()


@pytest.fixture(scope="session")
def zoo(pytestconfig: pytest.Config) -> Zoo:
    return pytestconfig.stash[ZOO]


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """What other modules compiled: torch counts how often one forward is compiled, and gives up after eight."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    zoo = config.stash[ZOO]
    if zoo.passed:
        models = len({name for name, _, _ in zoo.passed})
        terminalreporter.write_line(
            f"{zoo.pairs(on_workers=False):,} (model, plan) pairs of {models} models are exact on virtual ranks, "
            f"{zoo.pairs(on_workers=True):,} on workers"
        )
