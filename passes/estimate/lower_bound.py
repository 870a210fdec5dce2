"""Lower bounds on the time and memory of a plan before it is built: the step of one device, divided without any loss.

Sharding never reduces the predicted work: a rank computes and holds at least its share, and pipeline bubbles come on
top. A plan that was priced bounds others, too: those that run its work in stages, and those on finer meshes. A plan
whose bound exceeds the memory, or the time of another plan, need not be built. Stages of a pipeline are assumed to have
equal shares of parameters and work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from moaic.ir.errors import Diagnostic
from moaic.passes.config import GATHERING, Config
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf.links import RankGroup
from moaic.passes.perf.machine import Machine
from moaic.passes.schedules import least_stretch, schedule_of

FINER = 0.99
"""Share of the time of a plan that one with more parts of the sequence and the weights takes at least.

Layouts are chosen by an estimate of their time, so that those of more parts may turn out a little faster.
"""

MOST_SUMS = 1.5
"""Most times that what sums of gradients cost is sent where parameters are sharded: scattered once, gathered twice."""

PARAMETER_PASSES = 4
"""Most times that a step reads each parameter, and that it reads or writes each gradient."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The step on one device: its seconds, and its memory."""

    seconds: float
    memory: Memory
    optimizer: float = 0.0
    """Seconds of them that the optimizer takes."""

    def shared(self, ranks: int, stretch: float) -> float:
        """Seconds of so many ranks."""
        return _stretched(self.seconds, self.optimizer, stretch) / ranks

    @property
    def activations(self) -> int:
        """Bytes at the peak that are neither persistent nor gradients; all gradients may exist at the peak."""
        held = self.memory
        return max(0, held.joint - held.parameters - held.optimizer - held.gradients)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a rank has of parameters and gradients, and what they cost it."""

    gradients: float = 0.0
    """Their number."""
    moved: float = 0.0
    """Bytes that are read and written for them in a step."""
    reduced: float = 0.0
    """Bytes of the gradients."""
    optimizer: float = 0.0
    """Seconds."""

    def seconds(self, config: Config, machine: Machine) -> float:
        """Seconds of a step for them on the mesh of `config`, if nothing else ran beside it."""
        return machine.seconds_to_move(self.moved).value + self.optimizer + self.of_sums(_replicas(config), machine)

    def of_sums(self, groups: Iterable[RankGroup], machine: Machine) -> float:
        """Seconds of adding up all gradients over each of these groups."""
        one = self.reduced / max(1.0, self.gradients)
        sums = (machine.collective("all_reduce", one, group).value for group in groups)
        return self.gradients * sum(machine.call_overhead.value + (1 + machine.contention) * each for each in sums)

    def split(self, stages: int, parts: float) -> Parameters:
        """What a rank has of them in one of these stages if it has one of these parts of each."""
        share = 1 / (stages * parts)
        return Parameters(self.gradients / stages, share * self.moved, share * self.reduced, share * self.optimizer)


@dataclass(frozen=True, slots=True)
class Work:
    """What a plan takes that does no more work than others."""

    seconds: float
    parameters: Parameters
    fixed: float = 0.0
    """Seconds that do not become fewer with the sizes of values: of calls and launches."""
    over_dp: float = 0.0
    """Seconds of collectives over `dp`: of gradients, but also of losses, counts and statistics of the batch."""

    @property
    def once(self) -> float:
        """Seconds for which no stage waits, after all micro-batches: of sums of gradients and the optimizer."""
        return self.parameters.optimizer + self.over_dp


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds from the step on one device (`alone`). A configuration that is not known has the bound zero."""

    by_config: Mapping[Config, Alone]
    machine: Machine
    simpler: Mapping[Config, Work] = field(default_factory=dict[Config, Work])
    """Plans that do no more work than others (`unstaged`, `least`)."""

    def seconds(self, config: Config) -> float:
        """Lower bound on the seconds of a step under `config`."""
        return self.all_seconds([config])[0]

    def all_seconds(self, configs: Iterable[Config]) -> list[float]:
        """Lower bounds on the seconds of a step under each of these."""
        busy = cache(self._busy)
        return [self._seconds(each, busy(each.mesh, _fills(each), _shape(each).stretch)) for each in configs]

    def of_mesh(self, orders: Sequence[Config]) -> float:
        """Lower bound on the seconds of all configurations on a mesh with one of these micro-batches and schedules."""
        mesh = orders[0].mesh

        def under(order: Config) -> float:
            stretch = least_stretch(order.schedule, order.pp, order.micro_batches)
            on_one = min((known.shared(mesh.ranks, stretch) for known in self.by_config.values()), default=0.0)
            return max(on_one, self._busy(mesh, _fills(order), stretch))

        return min(map(under, orders))

    def _seconds(self, config: Config, busy: float) -> float:
        known, same = self.by_config.get(alone(config)), self.simpler.get(unstaged(config))
        stretch = _shape(config).stretch
        on_one = 0.0 if known is None else known.shared(config.ranks, stretch)
        return max(on_one, busy, 0.0 if same is None else _stretched(same.seconds, same.once, stretch) / config.pp)

    def _busy(self, mesh: Config, fills: bool, stretch: float) -> float:
        """Lower bound on the seconds of a pipeline with this stretch on a mesh, from the plans that are known.

        A pipeline that is full of micro-batches runs no fewer kernels than dp in place of its stages, on as many rows.
        """
        if (same := self.simpler.get(least(mesh))) is not None:
            on_stages = _stretched(same.seconds, same.once, stretch)
        else:
            on_stages = max((self._finer(other, least(mesh), stretch) for other in self.simpler), default=0.0)
        in_place = max((self._finer(other, mesh, stretch) for other in self.simpler), default=0.0) if fills else 0.0
        return max(on_stages / mesh.pp, in_place)

    def _finer(self, coarser: Config, mesh: Config, stretch: float) -> float:
        """Lower bound from a plan on a coarser mesh: its seconds, less what its parameters cost more; else zero."""
        if self.machine.made or not is_coarser(coarser, mesh):
            # Only some kernels are known as they are made: those of one plan and the assumed ones of another differ.
            return 0.0
        work = self.simpler[coarser]
        before = work.parameters.seconds(coarser, self.machine)
        after = work.parameters.split(mesh.pp, mesh.tp / coarser.tp).seconds(mesh, self.machine)
        others = max(0.0, work.over_dp - work.parameters.of_sums([_dp(coarser)], self.machine))
        lost = MOST_SUMS * max(0.0, before - after) + others + (work.fixed if mesh.pp > 1 else 0.0)
        return _stretched(max(0.0, FINER * (work.seconds - lost)), work.once, stretch)

    def nbytes(self, config: Config) -> int:
        """Lower bound on the peak bytes of a worker under `config`."""
        known = self.by_config.get(alone(config))
        if known is None:
            return 0
        held, level = known.memory, config.distribute_param
        parts = config.pp * config.ep * config.tp
        trained = parts * (1 if level == "none" else config.dp)
        persistent = held.parameters // (parts * (config.dp if level in GATHERING else 1)) + held.optimizer // trained
        gathered = held.parameters // (parts * _narrower(config)) if level == "step" else 0
        sums = held.gradients // parts if level in ("none", "optimizer") and config.micro_batches > 1 else 0
        return persistent + max(2 * held.gradients // trained, gathered + sums + _kept(known.activations, config))


def _stretched(seconds: float, once: float, stretch: float) -> float:
    """Seconds of which all but some are stretched by the waiting of stages."""
    return stretch * max(0.0, seconds - once) + min(seconds, once)


def _narrower(config: Config) -> int:
    """How many times narrower gathered parameters may be: eight bits instead of 32."""
    return 4 if config.distribute_low_prec_param else 1


def unstaged(config: Config) -> Config:
    """The plan whose work the stages of `config` share, on as many times fewer ranks: they can do no less than that."""
    return replace(config, pp=1, schedule=Config().schedule, distribute_param="none", distribute_low_prec_param=False)


def least(config: Config) -> Config:
    """The plan on the same mesh, stages left out, that computes and sends least: whatever it needs in memory."""
    return replace(config.mesh, pp=1)


def work_of(config: Config, prediction: Prediction, memory: Memory, gradients: int) -> Work:
    """The work of a plan that has been priced, with so many gradients."""
    moved = PARAMETER_PASSES * config.micro_batches * (memory.parameters + memory.gradients)
    return Work(
        prediction.seconds.value,
        Parameters(gradients, moved, memory.gradients, prediction.of("optimizer")),
        prediction.of("overhead") + prediction.of("launch"),
        prediction.over_dp,
    )


def _replicas(config: Config) -> list[RankGroup]:
    """The groups over which gradients may have to be added up."""
    inner = {"cp": config.tp, "ep": config.tp * config.cp}
    groups = [RankGroup(getattr(config, axis), stride, config.ranks) for axis, stride in inner.items()]
    return [group for group in (*groups, _dp(config)) if group.ranks > 1]


def _dp(config: Config) -> RankGroup:
    return RankGroup(config.dp, config.tp * config.cp * config.ep, config.ranks)


def is_coarser(config: Config, mesh: Config) -> bool:
    """Whether `mesh` is that of `config` with some of its dp turned into stages, or parts of the sequence or weights.

    Every rank then has as many times more rows, and what is not split further is computed for all of them; what is
    split is computed for as many values as before, and sent to more ranks. Only parameters become fewer.
    """
    return (
        config.ranks == mesh.ranks
        and config.mesh != mesh.mesh
        and config == least(config)
        and config.ep == mesh.ep
        and mesh.tp % config.tp == 0
        and mesh.cp % config.cp == 0
    )


def _fills(config: Config) -> bool:
    return config.micro_batches >= config.pp


def coarsest(mesh: Config, meshes: Iterable[Config]) -> Config:
    """The coarsest mesh of which `mesh` is a finer one, or is itself: its work bounds the most."""
    return min((each for each in meshes if is_coarser(each, mesh)), key=parts, default=mesh)


def parts(config: Config) -> int:
    """Parts of the sequence and the weights."""
    return config.tp * config.cp * config.ep


def fewer_bytes(memory: Memory, more: float) -> int:
    """Lower bound on the peak of a plan with `more` times as many micro-batches as the plan that needs `memory`.

    No value becomes smaller than in proportion to its rows; parameters and optimizer state do not become smaller.
    """
    stays = memory.parameters + memory.optimizer
    return max(memory.step, stays + int((memory.joint - stays) / more))


def alone(config: Config) -> Config:
    """The decisions of `config` that change how much one device computes and holds."""
    return Config(recompute=config.recompute, loss_chunks=config.loss_chunks)


def _kept(activations: int, config: Config) -> int:
    """Bytes of activations on the fullest worker, if stages are cut such that these are minimal."""
    of_micro_batch = activations / (config.dp * config.ep * config.cp * config.tp * config.micro_batches)
    return int(of_micro_batch * _shape(config).kept)


@dataclass(frozen=True, slots=True)
class _Shape:
    """What the schedule of a configuration does to time and memory."""

    stretch: float = 1.0
    kept: float = 1.0
    """Activations of whole micro-batches that the fullest worker holds.

    Workers that keep `n` micro-batches hold equally many bytes when their shares of a micro-batch's activations are in
    inverse proportion to their `n`.
    """


def _shape(config: Config) -> _Shape:
    return _cached_shape(config.schedule, config.pp, config.micro_batches) if config.pp > 1 else _Shape()


@cache
def _cached_shape(name: str, workers: int, parts: int) -> _Shape:
    """The shape of a schedule; where there is no such schedule, building the plan raises the error."""
    try:
        schedule = schedule_of(name, workers, parts)
    except Diagnostic:
        return _Shape()
    chunks = schedule.stages // workers
    return _Shape(schedule.stretch, 1 / sum(chunks / schedule.unfinished(worker) for worker in range(workers)))
