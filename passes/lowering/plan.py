"""A plan: one configuration of one step, with the module that people read and the programs that workers run."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.ir.graph import Function, Module
from moaic.passes.config import Config
from moaic.passes.lowering.programs import Programs
from moaic.passes.pipeline.stage_actions import signature_on_workers
from moaic.passes.schedules import schedule_in


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration of one step, lowered: the annotated module that people read and the programs that run."""

    config: Config
    module: Module
    programs: Programs

    @property
    def on_workers(self) -> Function:
        """The step with the homes of its parameters and results on the workers that run the stages."""
        main, schedule = self.module.main, schedule_in(self.module)
        return main if schedule is None else signature_on_workers(main, schedule)
