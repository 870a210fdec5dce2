"""From a captured step and a configuration to a plan: the passes that carry out its decisions, and what they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.verify import check_made
from moaic.passes.config import Config
from moaic.passes.lowering.plan import Plan
from moaic.passes.lowering.programs import lower
from moaic.passes.pass_options import Pass
from moaic.passes.pipeline.assign_stages import AssignStages
from moaic.passes.pipeline.shares import Share, shares
from moaic.passes.pipeline.split_backward import SplitBackward
from moaic.passes.pipeline.stage_runs import runs_of
from moaic.passes.schedules import schedule_of
from moaic.passes.sharding.context_parallel import ContextParallel
from moaic.passes.sharding.data_parallel import DataParallel, MicroBatches
from moaic.passes.sharding.expert_parallel import ExpertParallel
from moaic.passes.sharding.fsdp import FullyShardedDataParallel
from moaic.passes.sharding.loss_chunks import LossChunks
from moaic.passes.sharding.of_padded import OfPadded
from moaic.passes.sharding.solver.costs import CostCoefficients
from moaic.passes.sharding.tensor_parallel import TensorParallel
from moaic.passes.transforms.outline import Outline
from moaic.passes.transforms.recompute import Recomputation
from moaic.passes.transforms.shallow import Stack, shallow, stacks_of


def build(step: Module, config: Config, coefficients: CostCoefficients | None = None) -> Plan:
    """The plan for `config`; raises Diagnostic (UnshardableOp among them) with the reason where there is none."""
    return Builder(step, coefficients).build(config)


class Builder:
    """Builds plans of one step. Plans that begin with the same passes share the modules that these make."""

    def __init__(self, step: Module, coefficients: CostCoefficients | None = None, *, is_sketch: bool = False) -> None:
        """`coefficients` are the rates by which layouts are chosen; assumed ones unless given.

        A sketch is outlined already, and its modules are only priced, so that they need not be verified.
        """
        self._coefficients = coefficients or CostCoefficients()
        self._verifies = not is_sketch
        self._outlined = step if is_sketch else check_made(Outline().apply(check_made(step, "capture")), Outline.name)
        self._results: dict[tuple[Pass, ...], Module | Diagnostic] = {}
        self._of_padded = OfPadded(step, lambda padded: Builder(padded, coefficients))

    @cached_property
    def stacks(self) -> Sequence[Stack]:
        """The stacks of equal layers of the step."""
        return stacks_of(self._outlined.main)

    def shares(self, stacks: Sequence[Stack], wanted: Sequence[int]) -> list[Share]:
        """What the stages of a pipeline have of the step; raises Diagnostic where it cannot be cut into these."""
        return shares(self._outlined, stacks, wanted)

    def runs(self, shares: Sequence[int]) -> list[list[Stack]]:
        """By stack of the step, its runs of units that a pipeline has whole in one of stages with these shares.

        Raises Diagnostic where it cannot be cut into these.
        """
        return runs_of(self._outlined, self.stacks, shares)

    def without(self, units: Iterable[tuple[Stack, int]]) -> Builder | None:
        """The builder for the step without so many units of each of these runs; None where it has no such form."""
        module = self._outlined
        for run, count in units:
            less = shallow(module, run, run.units - count)
            if less is None:
                return None
            module = less
        return Builder(module, self._coefficients, is_sketch=True)

    def unverified(self) -> Builder:
        """The builder of plans that are only priced: what is selected of them is made and verified again."""
        return Builder(self._outlined, self._coefficients, is_sketch=True)

    def build(self, config: Config) -> Plan:
        """The plan for `config`; raises Diagnostic (UnshardableOp among them) with the reason where there is none."""
        module = self.partitioned(config)
        return Plan(config, module, lower(module))

    def partitioned(self, config: Config) -> Module:
        """The module of the plan for `config`; raises Diagnostic with the reason where there is none."""
        if (other := self._of_padded.instead(config)) is not None:
            return other.partitioned(config)
        module, done = self._outlined, ()
        for step in passes_of(config, self._coefficients):
            done = (*done, step)
            module = self._after(module, done)
        return module

    def _after(self, before: Module, passes: tuple[Pass, ...]) -> Module:
        """`before` after the last of these passes; raises the Diagnostic of a pass that failed before."""
        if passes not in self._results:
            self._results[passes] = self._outcome(before, passes[-1])
        result = self._results[passes]
        if isinstance(result, Diagnostic):
            raise result
        return result

    def _outcome(self, before: Module, last: Pass) -> Module | Diagnostic:
        try:
            result = last.apply(before)
        except Diagnostic as reason:
            return reason
        return check_made(result, last.name) if self._verifies else result


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
        yield AssignStages(config.pp, config.schedule, config.stage_shares)
    if config.loss_chunks > 1:
        yield LossChunks(config.loss_chunks)
