"""From a captured step and a configuration to a plan: the pipeline of passes, one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.verify import check_made
from moaic.passes.actions import signature_on_workers
from moaic.passes.annotate import Axis
from moaic.passes.chunk import in_chunks
from moaic.passes.config import Config
from moaic.passes.context import follow_context
from moaic.passes.distribute import distribute
from moaic.passes.experts import follow_experts
from moaic.passes.follow import follow_space, follow_time
from moaic.passes.outline import outline
from moaic.passes.program import Programs, lower
from moaic.passes.recompute import recompute
from moaic.passes.schedule import schedule_in, schedule_of
from moaic.passes.solver_prices import Prices
from moaic.passes.stage import in_stages
from moaic.passes.tensor import follow_tensor
from moaic.passes.timed import CHUNKS, MICRO_BATCHES
from moaic.passes.weights import split_weights


@dataclass(frozen=True, slots=True)
class Plan:
    """One configuration of one step, lowered: the annotated module that people read and the programs that run."""

    config: Config
    module: Module
    programs: Programs
    pre_flops: int

    @property
    def on_workers(self) -> Function:
        """The step with the homes of its parameters and results on the workers that run the stages."""
        main, schedule = self.module.main, schedule_in(self.module)
        return main if schedule is None else signature_on_workers(main, schedule)


@dataclass(frozen=True, slots=True)
class Made:
    """What the passes up to some point gave: a module, and the FLOPs that its micro-batches run beforehand."""

    module: Module
    pre_flops: int = 0


Stage = Callable[[Made], Made]


def build(step: Module, config: Config, prices: Prices | None = None) -> Plan:
    """The plan for `config`; raises Diagnostic (Barrier among them) with the reason where there is none."""
    return Builder(step, prices).build(config)


class Builder:
    """Builds plans of one step. Plans whose configurations begin alike share what the passes made until they part."""

    def __init__(self, step: Module, prices: Prices | None = None) -> None:
        """`prices` are what layouts are chosen by; assumed ones unless given."""
        self._prices = prices or Prices()
        self._outlined = Made(check_made(outline(check_made(step, "capture")), "outline"))
        self._made: dict[tuple[str, Config], Made | Diagnostic] = {}

    def build(self, config: Config) -> Plan:
        """The plan for `config`; raises Diagnostic (Barrier among them) with the reason where there is none."""
        made = self._outlined
        so_far = Config()
        for decided, name, stage in self._stages(config):
            so_far = replace(so_far, **decided)
            made = self._after(made, (name, so_far), stage)
        return Plan(config, made.module, lower(made.module), made.pre_flops)

    def _stages(self, config: Config) -> list[tuple[dict[str, object], str, Stage]]:
        """Each pass with the decisions that it carries out."""
        mb, dp, ep, cp, tp = config.micro_batches, config.dp, config.ep, config.cp, config.tp
        level, narrow = config.distribute_param, config.distribute_low_prec_param
        mode, prices = config.recompute, self._prices
        stages: list[tuple[dict[str, object], str, Stage]] = [
            ({"recompute": mode}, "recompute", _with(lambda m: recompute(m, mode)))
        ]
        if mb > 1:
            stages.append(
                ({"micro_batches": mb}, MICRO_BATCHES, lambda m: _timed(m, Axis(MICRO_BATCHES, mb, in_time=True)))
            )
        if dp > 1:
            stages.append(({"dp": dp}, "dp", _with(lambda m: follow_space(m, Axis("dp", dp)).module)))
        if ep > 1:
            stages.append(({"ep": ep}, "ep", _with(lambda m: follow_experts(m, Axis("ep", ep), prices).module)))
        if cp > 1:
            gather = config.gather_keys
            follow = _with(lambda m: follow_context(m, Axis("cp", cp), prices, gather, tp).module)
            stages.append(({"cp": cp, "gather_keys": gather, "tp": tp}, "cp", follow))
        if tp > 1:
            stages.append(({"tp": tp}, "tp", _with(lambda m: follow_tensor(m, Axis("tp", tp), prices).module)))
        decided: dict[str, object] = {"distribute_param": level, "distribute_low_prec_param": narrow}
        stages.append((decided, "distribute", _with(lambda m: distribute(m, level, narrow))))
        if config.pp > 1:
            schedule = schedule_of(config.schedule, config.pp, mb)
            if mb > 1 and schedule.splits_backward:
                stages.append(({"schedule": config.schedule}, "weights", _with(split_weights)))
            decided = {"pp": config.pp, "schedule": config.schedule}
            stages.append((decided, "pp", _with(lambda m: in_stages(m, schedule))))
        if config.loss_chunks > 1:
            chunks = config.loss_chunks
            stages.append(({"loss_chunks": chunks}, CHUNKS, _with(lambda m: in_chunks(m, chunks))))
        return stages

    def _after(self, before: Made, key: tuple[str, Config], stage: Stage) -> Made:
        if key not in self._made:
            self._made[key] = _outcome(before, key[0], stage)
        made = self._made[key]
        if isinstance(made, Diagnostic):
            raise made
        return made


def _with(change: Callable[[Module], Module]) -> Stage:
    """The stage that changes the module and nothing else."""
    return lambda made: replace(made, module=change(made.module))


def _timed(made: Made, axis: Axis) -> Made:
    timed = follow_time(made.module, axis)
    return Made(timed.module, timed.pre_flops)


def _outcome(before: Made, name: str, stage: Stage) -> Made | Diagnostic:
    """What a pass makes, verified, or its reason why it cannot."""
    try:
        made = stage(before)
    except Diagnostic as reason:
        return reason
    check_made(made.module, name)
    return made
