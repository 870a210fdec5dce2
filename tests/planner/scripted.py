"""A pool of the planner whose answers are given, so that a test says what is fast and what fits."""

from __future__ import annotations

from collections.abc import Sequence

from moaic.ir.graph import Module
from moaic.passes.config import Config, Request
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.stages import StageBound
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import Number
from moaic.planner.worker import Compiled

SMALL = Request(recompute="saved")


class Scripted:
    """A pool whose answers are given."""

    def __init__(
        self,
        seconds: dict[Config, float],
        peaks: dict[Config, int] | None = None,
        compiling: dict[Config, float] | None = None,
    ) -> None:
        self.seconds = seconds
        self.peaks = peaks or {}
        self.compiling = compiling or {}
        self.compiled: list[Config] = []
        self.limit = 0

    def begin(self, step: Module, machine: Machine) -> None:
        self.limit = machine.memory

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        self.compiled += configs
        return [self._compiled(config) for config in configs]

    def _compiled(self, config: Config) -> Compiled:
        if config not in self.seconds:
            return Compiled(dropped="no")
        return Compiled(Memory(0, 0, 0, self.peaks.get(config, 1), self.limit))

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        return [
            Prediction({"heavy": Number(self.seconds[config])}, self.compiling.get(config, 0.0)) for config in configs
        ]

    def stage_bounds(self, configs: Sequence[Config]) -> list[StageBound]:
        return [StageBound() for _ in configs]
