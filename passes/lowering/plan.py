"""A plan: one configuration of one step, its partitioned module and its programs."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.ir.graph import Function, Module
from moaic.passes.config import Config
from moaic.passes.lowering.programs import Programs
from moaic.passes.pipeline.stage_actions import signature_on_workers
from moaic.passes.schedules import schedule_in


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration of one step: the partitioned module, which `moaic` prints, and the programs of the workers."""

    config: Config
    module: Module
    programs: Programs

    @property
    def on_workers(self) -> Function:
        """The signature of the step, each parameter and result owned by the worker that runs its stage."""
        main, schedule = self.module.main, schedule_in(self.module)
        return main if schedule is None else signature_on_workers(main, schedule)
