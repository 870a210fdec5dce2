"""Plans run for a few steps on values of their own: parameters and the states of optimizers stay as they are."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.lowering.plan import Plan
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.calibrate import inputs_of
from moaic.runtime.controller.errors import OP_ERRORS, WorkerError
from moaic.runtime.host.env_flags import GraphMode

ROUNDS: Final = 3
"""Rounds of steps, of which the best counts: other processes use the machine, too."""

LONG: Final = 0.2
"""Seconds that the steps of a round take at least."""

MOST_STEPS: Final = 20

WARM_UP: Final = 2
"""Steps in which functions are compiled, libraries loaded and graphs captured."""

KEY: Final = (0, 0)
"""Of random ops."""


@dataclass(frozen=True, slots=True)
class PlanRunner:
    """Runs the joint programs of plans as those of a training are run."""

    accelerator: Accelerator
    compiled: bool
    graphs: GraphMode

    def __call__(self, plan: Plan, expected: float) -> float | None:
        """Seconds of a step, the optimizer left out, in the best round; None where it cannot run."""
        self.accelerator.synchronize()  # raises what has failed before, which is the user's to see
        # Such as for want of memory, which is the same for the user: this plan is no rival.
        with suppress(WorkerError, *OP_ERRORS.values()):
            return self._seconds(plan.in_example().programs.joint, max(1, min(MOST_STEPS, round(LONG / expected))))
        return None

    def _seconds(self, program: Module, steps: int) -> float:
        accelerator = self.accelerator
        number = accelerator.load(render(program), compiled=self.compiled, graphs=self.graphs, module=program)
        main, inputs = program.main, inputs_of(accelerator, number)
        has_key = any(main.param_role(index).kind == "key" for index in range(len(main.params)))
        outputs, resting = [None] * len(main.results), frozenset(inputs)

        def ran(count: int) -> float:
            start = time.perf_counter()
            for _ in range(count):
                accelerator.run(number, inputs, outputs, KEY if has_key else None, rest=resting)
            accelerator.synchronize()
            return (time.perf_counter() - start) / count

        ran(WARM_UP)
        return min(ran(steps) for _ in range(ROUNDS))
