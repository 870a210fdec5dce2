"""From a captured step and a configuration to a plan: the passes that carry out its decisions, and what they make."""

from __future__ import annotations

from collections.abc import Iterator

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import check_made
from moaic.passes.config import Config
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import lower
from moaic.passes.pass_options import Pass
from moaic.passes.pipeline.assign_stages import AssignStages
from moaic.passes.pipeline.split_backward import SplitBackward
from moaic.passes.schedules import schedule_of
from moaic.passes.sharding.context_parallel import ContextParallel
from moaic.passes.sharding.data_parallel import DataParallel, MicroBatches
from moaic.passes.sharding.expert_parallel import ExpertParallel
from moaic.passes.sharding.fsdp import FullyShardedDataParallel
from moaic.passes.sharding.loss_chunks import LossChunks
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.tensor_parallel import TensorParallel
from moaic.passes.transforms.outline import Outline
from moaic.passes.transforms.recompute import Recomputation


def build(step: Module, config: Config, coefficients: CostCoefficients | None = None) -> Plan:
    """The plan for `config`; raises Diagnostic (UnshardableOp among them) with the reason where there is none."""
    return Builder(step, coefficients).build(config)


class Builder:
    """Builds plans of one step. Plans that begin with the same passes share the modules that these make."""

    def __init__(self, step: Module, coefficients: CostCoefficients | None = None) -> None:
        """`coefficients` are the rates by which layouts are chosen; assumed ones unless given."""
        self._coefficients = coefficients or CostCoefficients()
        self._outlined = check_made(Outline().apply(check_made(step, "capture")), Outline.name)
        self._results: dict[tuple[Pass, ...], Module | Diagnostic] = {}

    def build(self, config: Config) -> Plan:
        """The plan for `config`; raises Diagnostic (UnshardableOp among them) with the reason where there is none."""
        module, done = self._outlined, ()
        for step in passes_of(config, self._coefficients):
            done = (*done, step)
            module = self._after(module, done)
        return Plan(config, module, lower(module))

    def _after(self, before: Module, passes: tuple[Pass, ...]) -> Module:
        """`before` after the last of these passes, verified; raises the Diagnostic of a pass that failed before."""
        if passes not in self._results:
            self._results[passes] = _outcome(before, passes[-1])
        result = self._results[passes]
        if isinstance(result, Diagnostic):
            raise result
        return result


def passes_of(config: Config, coefficients: CostCoefficients) -> Iterator[Pass]:
    """The passes that carry out the decisions of `config` on an outlined step, in the order of the registry."""
    yield Recomputation(config.recompute)
    if config.micro_batches > 1:
        yield MicroBatches(config.micro_batches)
    if config.dp > 1:
        yield DataParallel(config.dp)
    if config.ep > 1:
        yield ExpertParallel(config.ep, coefficients)
    if config.cp > 1:
        yield ContextParallel(config.cp, config.gather_keys, config.tp, coefficients)
    if config.tp > 1:
        yield TensorParallel(config.tp, coefficients)
    yield FullyShardedDataParallel(config.distribute_param, config.distribute_low_prec_param)
    if config.pp > 1:
        schedule = schedule_of(config.schedule, config.pp, config.micro_batches)
        if config.micro_batches > 1 and schedule.splits_backward:
            yield SplitBackward()
        yield AssignStages(config.pp, config.schedule)
    if config.loss_chunks > 1:
        yield LossChunks(config.loss_chunks)


def _outcome(before: Module, last: Pass) -> Module | Diagnostic:
    try:
        result = last.apply(before)
    except Diagnostic as reason:
        return reason
    return check_made(result, last.name)
