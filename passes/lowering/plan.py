"""A plan: one configuration of one step, its partitioned module and its programs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moaic.ir.graph import Function, Module
from moaic.ir.specialize import specialized, symbols_of
from moaic.ir.symbols import Numbers
from moaic.passes.config import Config
from moaic.passes.lowering.programs import Programs
from moaic.passes.pipeline.stage_actions import signature_on_workers
from moaic.passes.schedules import schedule_in


@dataclass(frozen=True)
class Plan:
    """One configuration of one step: the partitioned module, which `moaic` prints, and the programs of the workers."""

    config: Config
    module: Module
    programs: Programs

    def at(self, numbers: Numbers) -> Plan:
        """The plan where the symbols of open sizes have these numbers."""
        return Plan(self.config, specialized(self.module, numbers), self.programs.at(numbers))

    def in_example(self) -> Plan:
        """The plan at the sizes of the example, of which estimates are."""
        symbols = symbols_of(self.module)
        return self if symbols is None else self.at(symbols.example_numbers())

    @cached_property
    def on_workers(self) -> Function:
        """The signature of the step, each parameter and result owned by the worker that runs its stage."""
        main, schedule = self.module.main, schedule_in(self.module)
        return main if schedule is None else signature_on_workers(main, schedule)
