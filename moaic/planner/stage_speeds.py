"""The shares of the work that stages of a pipeline get where the workers of a machine are not equally fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd

from moaic.ir.graph import Module
from moaic.passes.config import Config
from moaic.passes.perf.machine import Machine
from moaic.passes.pipeline.stage_shares import EQUAL
from moaic.planner.pricer import Pricer

FINENESS = 4
"""Parts of the slowest stage's share by which shares are told apart."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast each kind of worker of a machine runs a step alone."""

    machine: Machine
    of_kind: tuple[float, ...]
    """Steps per second."""

    def shares(self, mesh: Config) -> str:
        """The shares of the workers along `pp`; `equal` where all are."""
        speeds = self._of_stages(mesh)
        parts = [round(FINENESS * speed / min(speeds)) for speed in speeds]
        common = gcd(*parts)
        return "+".join(str(part // common) for part in parts) if len({*parts}) > 1 else EQUAL

    def fastest(self, mesh: Config) -> float:
        """How many of the fastest workers do as much as those of a plan."""
        return mesh.ranks / mesh.pp * sum(self._of_stages(mesh)) / self.of_kind[0]

    def fewer(self, workers: int) -> list[int]:
        """Numbers of workers, up to so many, that are all of the fastest kinds: slower ones may not be worth it."""
        ends = accumulate(kind.workers for kind in self.machine.kinds)
        return [*(end for end in ends if end < workers), workers]

    def _of_stages(self, mesh: Config) -> list[float]:
        """The speed of each worker along `pp`: that of the slowest of its ranks, which the others wait for."""
        return [self.of_kind[self.machine.slowest_kind(ranks)] for ranks in mesh.ranks_of_stages]


def speeds_of(step: Module, machine: Machine) -> Speeds | None:
    """The speeds of a machine's workers; None where they are equal."""
    if not machine.kinds:
        return None
    alone = (replace(each, made={}) for each in machine.by_kind)
    return Speeds(machine, tuple(1 / Pricer(step, each).price(Config())[1].seconds.value for each in alone))
