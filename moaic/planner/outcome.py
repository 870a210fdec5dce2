"""The outcome of a candidate, and the order of prices and of simplicity by which one is selected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moaic.passes.config import Config, simplicity
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.step_time import EXPECTED_STEPS, Prediction
from moaic.planner.worker import Compiled
from moaic.text.units import mib

TIE = 0.02
"""Relative difference from the best price up to which prices count as equal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration, dropped with a reason or possible with a prediction."""

    config: Config
    memory: Memory | None = None
    prediction: Prediction | None = None
    dropped: str = ""
    crash: str = ""
    """Trace of the bug of moaic for which it is dropped."""
    others: int = 0
    """Candidates on the same mesh, none of them simpler, that are dropped for the same reason."""
    is_measured: bool = False
    """Whether it was predicted with the measured times of its own kernels, as the best candidates are."""
    seconds: float | None = None
    """Seconds of a step as it ran, where it did (`autotune`)."""

    @property
    def told(self) -> str:
        """The configuration, and how many others it stands for."""
        return f"{self.config} and {self.others} others on these axes" if self.others else str(self.config)

    @property
    def outcome(self) -> str:
        return self.dropped or "possible"

    def price(self, steps: int) -> float:
        """Seconds of one of `steps` steps of a candidate that is possible, as it ran if it did: it is compiled then."""
        if self.seconds is not None:
            return self.seconds
        assert self.prediction is not None
        return self.prediction.price(steps)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every candidate of a step, and which of them was selected."""

    candidates: tuple[Candidate, ...]
    selected: Config
    apart: int = 0
    """Peak bytes per worker of the selected plan if forward and backward run as two programs; 0 where it is unknown."""
    held: int = 0
    """Peak bytes per worker if they run as one program while the user holds all outputs."""
    steps: int = EXPECTED_STEPS
    """Steps over which the time to compile was spread."""
    is_final: bool = True
    """Whether another search would have the same result."""

    def of(self, config: Config) -> Candidate:
        return next(candidate for candidate in self.candidates if candidate.config == config)

    @property
    def ranked(self) -> list[Candidate]:
        """Possible candidates: the selected one, then what ran, what has measured kernels, and the rest by price."""
        possible = [candidate for candidate in self.candidates if candidate.prediction is not None]
        return sorted(possible, key=self._rank)

    def _rank(self, each: Candidate) -> tuple[bool, bool, bool, float]:
        return each.config != self.selected, each.seconds is None, not each.is_measured, each.price(self.steps)


def compiled_candidate(config: Config, result: Compiled) -> Candidate:
    """The outcome of compiling a candidate, without its prediction."""
    if result.crash:
        return crashed(config, result.crash)
    if (memory := result.memory) is not None and memory.peak > memory.limit:
        return Candidate(config, memory, dropped=f"needs {per_worker(memory.peak, memory.limit)}")
    return Candidate(config, result.memory, dropped=result.dropped)


def crashed(config: Config, trace: str) -> Candidate:
    return Candidate(config, dropped=trace.strip().rpartition("\n")[2], crash=trace)


def simplest_of_equals(candidates: Iterable[Candidate], steps: int) -> Config | None:
    """The simplest of the possible candidates whose price is the best or equal to it; None if none is possible.

    Where kernels of the best were measured, only these count.
    """
    possible = [each for each in candidates if each.prediction is not None]
    compared = [each for each in possible if each.is_measured] or possible
    return simplest({each.config: each.price(steps) for each in compared})


def simplest(prices: Mapping[Config, float]) -> Config | None:
    """The simplest of those whose price is the best or equal to it; None of none."""
    equal = [config for config, price in prices.items() if price <= min(prices.values()) * (1 + TIE)]
    return min(equal, key=simplicity, default=None)


def per_worker(nbytes: int, limit: int) -> str:
    return f"{mib(nbytes)} per worker, and there are {mib(limit)}"
