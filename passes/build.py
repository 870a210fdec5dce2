"""From a captured step and a configuration to a plan: the pipeline of passes, one line each."""

from __future__ import annotations

from dataclasses import dataclass

from moaic.ir.graph import Module
from moaic.ir.verify import verify
from moaic.passes.annotate import Axis
from moaic.passes.config import Config
from moaic.passes.distribute import distribute
from moaic.passes.follow import follow_space, follow_time
from moaic.passes.outline import outline
from moaic.passes.program import Programs, lower
from moaic.passes.recompute import recompute
from moaic.passes.tensor import follow_tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration of one step, lowered: the annotated module that people read and the programs that run."""

    config: Config
    module: Module
    programs: Programs
    pre_flops: int


def build(step: Module, config: Config) -> Plan:
    """The plan for `config`; raises Diagnostic (Barrier among them) with the reason where there is none."""
    module = recompute(outline(step), config.recompute)
    pre_flops = 0
    if config.micro_batches > 1:
        timed = follow_time(module, Axis("mb", config.micro_batches, in_time=True))
        module, pre_flops = timed.module, timed.pre_flops
    if config.dp > 1:
        module = follow_space(module, Axis("dp", config.dp)).module
    if config.tp > 1:
        module = follow_tensor(module, Axis("tp", config.tp)).module
    module = distribute(module, config.distribute_param, config.distribute_low_prec_param)
    verify(module)
    return Plan(config, module, lower(module), pre_flops)
