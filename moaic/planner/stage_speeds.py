"""The shares of the work that stages of a pipeline get where the workers of a machine are not equally fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd

from moaic.ir.graph import Module
from moaic.passes.config import Config
from moaic.passes.perf.machine import Machine
from moaic.passes.stage_shares import EQUAL, MOST
from moaic.planner.pricer import Pricer

FINENESS = 8
"""Parts of the smallest share by which shares are told apart."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """How fast each kind of worker of a machine runs a step alone."""

    machine: Machine
    of_kind: tuple[float, ...]
    """Steps per second."""

    def shares(self, mesh: Config) -> list[str]:
        """The shares that the workers along `pp` may get: by their speeds, and by their memory."""
        memory = [self.machine.least_memory(ranks) for ranks in mesh.ranks_of_stages]
        return [*dict.fromkeys(map(_in_proportion, (self._of_stages(mesh), memory)))]

    def fastest(self, mesh: Config) -> float:
        """How many of the fastest workers do as much as those of a plan."""
        return mesh.ranks / mesh.pp * sum(self._of_stages(mesh)) / self.of_kind[0]

    def prefixes(self, workers: int) -> list[int]:
        """Numbers of workers, up to so many, that are all of the fastest kinds: slower ones may not be worth it."""
        ends = accumulate(kind.workers for kind in self.machine.kinds)
        return [*(end for end in ends if end < workers), workers]

    def _of_stages(self, mesh: Config) -> list[float]:
        """The speed of each worker along `pp`: that of the slowest of its ranks, which the others wait for."""
        return [self.of_kind[self.machine.slowest_kind(ranks)] for ranks in mesh.ranks_of_stages]


def _in_proportion(sizes: Sequence[float]) -> str:
    """Shares in proportion to sizes; `equal` where all are about the same."""
    least = max(min(sizes), FINENESS * max(sizes) / MOST)
    parts = [max(1, round(FINENESS * size / least)) for size in sizes]
    common = gcd(*parts)
    return "+".join(str(part // common) for part in parts) if len({*parts}) > 1 else EQUAL


def speeds_of(step: Module, machine: Machine) -> Speeds | None:
    """The speeds of a machine's workers, those that run `step` fastest first; None where all are equal."""
    if not machine.kinds:
        return None
    alone = (replace(each, made={}) for each in machine.by_kind)
    speeds = [1 / Pricer(step, each).price(Config())[1].seconds.value for each in alone]
    order = sorted(range(len(speeds)), key=lambda kind: -speeds[kind])
    kinds = tuple(machine.kinds[kind] for kind in order)
    return Speeds(replace(machine, kinds=kinds), tuple(speeds[kind] for kind in order))
