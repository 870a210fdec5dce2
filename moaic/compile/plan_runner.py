"""Plans run for a few steps on values of their own: parameters and the states of optimizers stay as they are."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.lowering.plan import Plan
from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.kernel_timing import FAILURES, settle
from moaic.runtime.controller.probe_inputs import KEY, inputs_of
from moaic.runtime.host.env_flags import GraphMode

ROUNDS: Final = 3
"""Rounds of steps, of which the best counts: other processes use the machine, too."""

LONG: Final = 0.2
"""Seconds that the steps of a round take at least."""

MOST_STEPS: Final = 20

WARM_UP: Final = 3
"""Steps in which functions are compiled, libraries loaded and graphs captured."""

INTEGERS: Final = (0, 1)
"""What integer inputs are: zero is an index of any table, and one divides any number."""


@dataclass(frozen=True, slots=True)
class PlanRunner:
    """Runs the joint programs of plans as those of a training are run."""

    accelerator: Accelerator
    compiled: bool
    graphs: GraphMode

    def __call__(self, plan: Plan, expected: float) -> float | str:
        """Seconds of a step, the optimizer left out, in the best round; why it cannot run, where it cannot.

        Raises EarlierFailure where an earlier command of the user has failed.
        """
        settle(self.accelerator)
        program, steps = plan.in_example().programs.joint, max(1, min(MOST_STEPS, round(LONG / expected)))
        reason = ""
        for integer in INTEGERS:
            try:
                return self._seconds(program, steps, integer)
            except FAILURES as error:
                reason = str(error).partition("\n")[0]
        return reason

    def _seconds(self, program: Module, steps: int, integer: int) -> float:
        accelerator = self.accelerator
        number = accelerator.load(render(program), compiled=self.compiled, graphs=self.graphs, module=program)
        main, inputs = program.main, inputs_of(accelerator, number, integer)
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
