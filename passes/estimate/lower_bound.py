"""Lower bounds on the time and memory of a plan before it is built: the step of one device, divided without any loss.

Sharding never reduces the predicted work: a rank computes and holds at least its share, and pipeline bubbles come on
top. A plan that was priced bounds others, too: those that run its work in stages, and those on finer meshes. A plan
whose bound exceeds the memory, or the time of another plan, need not be built. Stages of a pipeline are assumed to have
equal shares of parameters and work.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

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

ALIKE = 0.97
"""Share of what is left of a peak, other parameters sharded, that there is at least: layouts may differ."""

PARAMETER_PASSES = 4
"""Most times that a step reads each parameter, and that it reads or writes each gradient."""

LAUNCHED_AGAIN = 0.9
"""Share of the launches of one micro-batch that each further one has at least: some kernels run once per step."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The step on one device: its seconds, and its memory."""

    seconds: float
    memory: Memory
    optimizer: float = 0.0
    """Seconds of them that the optimizer takes."""
    compiling: float = 0.0
    """Seconds that compiling it takes."""
    launches: float = 0.0
    """Seconds of launching its kernels, which each rank does for the layers and the micro-batches that it has."""

    def shared(self, ranks: float, stretch: float, turns: float) -> float:
        """Seconds of so many ranks, each of which launches all kernels so many times."""
        launches = LAUNCHED_AGAIN * max(0.0, turns - 1 / ranks) * self.launches
        return _stretched(self.seconds, self.optimizer, stretch) / ranks + stretch * launches


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
    calls: float = 0.0
    """Seconds of its calls, which do not become fewer with the sizes of values."""
    launches: float = 0.0
    """Seconds of launching its kernels: they do not either, and each micro-batch has as many."""
    over_dp: float = 0.0
    """Seconds of collectives over `dp`: of gradients, but also of losses, counts and statistics of the batch."""
    memory_replicated: Memory | None = None
    """Its memory, if no parameters are sharded."""

    @property
    def once(self) -> float:
        """Seconds for which no stage waits, after all micro-batches: of sums of gradients and the optimizer."""
        return self.parameters.optimizer + self.over_dp


@dataclass(frozen=True, slots=True)
class _WholeBatch:
    """Lower bound on the seconds of a plan with one micro-batch."""

    seconds: float
    once: float
    """Seconds of them for which no stage waits."""
    launches: float
    """Seconds of them that each further micro-batch takes again."""

    def in_parts(self, parts: float, stretch: float) -> float:
        """With so many micro-batches, and a schedule with this stretch."""
        return _stretched(self.seconds + LAUNCHED_AGAIN * (parts - 1) * self.launches, self.once, stretch)


@dataclass(frozen=True, slots=True)
class _OnMesh:
    """Lower bounds on the seconds of a mesh."""

    in_turn: Sequence[_WholeBatch]
    """Of ranks that do the work of all stages."""
    in_place: Sequence[_WholeBatch]
    """Of pipelines that are full of micro-batches: as many as there are stages take the time of one."""

    def under(self, order: Config, stretch: float) -> float:
        """Lower bound on the seconds of a configuration on this mesh whose schedule has this stretch."""
        parts, stages = order.micro_batches, order.pp
        in_turn = max((each.in_parts(parts, stretch) for each in self.in_turn), default=0.0) / stages
        if parts < stages:
            return in_turn
        return max([in_turn, *(each.in_parts(parts / stages, stretch) for each in self.in_place)])


@dataclass(frozen=True)
class Bounds:
    """Bounds from the step on one device (`alone`). A configuration that is not known has the bound zero."""

    by_config: Mapping[Config, Alone]
    machine: Machine
    simpler: Mapping[Config, Work] = field(default_factory=dict[Config, Work])
    """Plans that do no more work than others (`unstaged`, `least`, `flat`, `in_turn`)."""
    fastest: Callable[[Config], float] = lambda mesh: mesh.ranks
    """How many workers that are as fast as the first do no less than those of a plan."""
    finer: dict[tuple[Config, Config], float] = field(default_factory=dict[tuple[Config, Config], float])
    """By known plan and finer mesh, the bound that was found before."""

    def seconds(self, config: Config) -> float:
        """Lower bound on the seconds of a step under `config`."""
        return self.all_seconds([config])[0]

    def all_seconds(self, configs: Iterable[Config]) -> list[float]:
        """Lower bounds on the seconds of a step under each of these."""
        on_mesh = cache(self._on_mesh)
        return [self._seconds(each, on_mesh(each.mesh)) for each in configs]

    def of_mesh(self, orders: Sequence[Config]) -> float:
        """Lower bound on the seconds of all configurations on a mesh with one of these micro-batches and schedules."""
        mesh = orders[0].mesh
        on_mesh = self._on_mesh(mesh)

        def under(order: Config) -> float:
            stretch = least_stretch(order.schedule, order.pp, order.micro_batches)
            on_one = min((self._on_one(known, order, stretch) for known in self.by_config.values()), default=0.0)
            return max(on_one, on_mesh.under(order, stretch))

        return min(map(under, orders))

    def _on_one(self, known: Alone, config: Config, stretch: float) -> float:
        """Lower bound from the step on one device."""
        # How long slow workers take to launch a kernel is not known.
        turns = 0.0 if self.machine.kinds else config.micro_batches / config.pp
        return known.shared(self.fastest(config.mesh), stretch, turns)

    def _seconds(self, config: Config, on_mesh: _OnMesh) -> float:
        known, same = self.by_config.get(alone(config)), self.simpler.get(unstaged(config))
        stretch = _shape(config).stretch
        on_one = 0.0 if known is None else self._on_one(known, config, stretch)
        staged = 0.0 if same is None else _stretched(same.seconds, same.once, stretch) / config.pp
        return max(on_one, on_mesh.under(config, stretch), staged)

    def _on_mesh(self, mesh: Config) -> _OnMesh:
        """Lower bounds for a mesh from the plans that are known.

        A pipeline that is full of micro-batches runs no fewer kernels than dp in place of its stages, on as many rows.
        """
        same = self.simpler.get(least(mesh))
        in_turn = (
            self._finer_than(least(mesh)) if same is None else [_WholeBatch(same.seconds, same.once, same.launches)]
        )
        # Stages leave slow workers less to do than dp in their place would.
        in_place = self._finer_than(mesh) if mesh.pp > 1 and not self.machine.kinds else []
        return _OnMesh(in_turn, in_place)

    def _finer_than(self, mesh: Config) -> list[_WholeBatch]:
        """The bound from the plan on each coarser mesh."""
        found: list[_WholeBatch] = []
        for coarser in self._by_ranks.get(mesh.ranks, ()):
            if (coarser, mesh) not in self.finer:
                self.finer[coarser, mesh] = self._finer(coarser, mesh) if is_coarser(coarser, mesh) else 0.0
            if seconds := self.finer[coarser, mesh]:
                work = self.simpler[coarser]
                found.append(_WholeBatch(seconds, work.once, work.launches))
        return found

    @cached_property
    def _by_ranks(self) -> Mapping[int, Sequence[Config]]:
        """The known plans that bound finer meshes, by their ranks."""
        found: dict[int, list[Config]] = defaultdict(list)
        # Where only some kernels are known as they are made, those of one plan and the assumed ones of another differ.
        for config in () if self.machine.made else self.simpler:
            if config == least(config):
                found[config.ranks].append(config)
        return found

    def _finer(self, coarser: Config, mesh: Config) -> float:
        """Lower bound from a plan on a coarser mesh: its seconds, less what its parameters cost more."""
        work = self.simpler[coarser]
        before = work.parameters.seconds(coarser, self.machine)
        after = work.parameters.split(mesh.pp, mesh.tp / coarser.tp).seconds(mesh, self.machine)
        others = max(0.0, work.over_dp - work.parameters.of_sums([_dp(coarser)], self.machine))
        lost = MOST_SUMS * max(0.0, before - after) + others + (work.calls + work.launches if mesh.pp > 1 else 0.0)
        return max(0.0, FINER * (work.seconds - lost))

    def gathering(self, config: Config, others: float) -> float:
        """Lower bound on the seconds of a pipeline that gathers parameters for every micro-batch and takes `others`.

        Gathers run one after the other, and what of them slows down the rest comes on top of it. Of those that nothing
        hides where one rank runs all stages, nothing else hides on the ranks of stages.
        """
        if config.pp == 1 or (gathered := self.simpler.get(in_turn(config))) is None:
            return 0.0
        beside = self.machine.contention if self.machine.overlaps else 1.0
        return max(FINER * gathered.seconds / config.pp, others + beside * gathered.over_dp / config.pp)

    def nbytes(self, config: Config) -> int:
        """Lower bound on the peak bytes of a worker under `config`."""
        bounds = [0]
        if (known := self.by_config.get(alone(config))) is not None:
            parts = config.ep * config.tp
            bounds.append(_nbytes(config, known.memory, parts, parts * config.cp * config.dp * config.micro_batches))
        same = self.simpler.get(replicated(config)) if config.pp == 1 else None
        if same is not None and same.memory_replicated is not None:
            bounds.append(_nbytes(config, same.memory_replicated, 1, 1))
        return max(bounds)


def _nbytes(config: Config, held: Memory, parts: int, shares: int) -> int:
    """Lower bound on the peak bytes of a worker from what a plan without stages and sharded parameters holds.

    A stage has one of so many `parts` of its parameters, and of its activations one of so many `shares`.
    """
    parts *= config.pp
    beside = persistent(config, held.parameters / parts, held.optimizer / parts)
    gradients = held.gradients / parts
    # A stage keeps what its backwards read; without these it has given most away when the next one has it.
    kept = _activations(held) / shares * _shape(config).kept if held.gradients or config.pp == 1 else 0.0
    of_optimizer = 2 * gradients / (1 if config.distribute_param == "none" else config.dp)
    # A stage that runs all forwards before its first backward has no sums beside all activations.
    sums = gradients if config.pp == 1 else 0.0
    return int(beside + max(of_optimizer, gathered(config, held.parameters / parts, sums) + kept))


def persistent(config: Config, parameters: float, optimizer: float) -> float:
    """Bytes that a rank keeps of these bytes of parameters and optimizer state, where dp shards them."""
    level, dp = config.distribute_param, config.dp
    return parameters / (dp if level in GATHERING else 1) + optimizer / (1 if level == "none" else dp)


def gathered(config: Config, parameters: float, gradients: float) -> float:
    """Bytes of these parameters and gradients that are whole on each rank during a step, beside persistent ones."""
    level = config.distribute_param
    # Gathered parameters have eight bits instead of 32 at best.
    whole = parameters / (4 if config.distribute_low_prec_param else 1) if level == "step" else 0.0
    # Sums over micro-batches are scattered after the last one.
    return whole + (gradients if level != "use" and config.micro_batches > 1 else 0.0)


def sharded_otherwise(prediction: Prediction, machine: Machine) -> float:
    """Lower bound on the seconds of a plan that shards parameters in another way than one with this prediction.

    That gathers no parameters; the other may.
    """
    sent = (1 + machine.contention) * prediction.over_dp
    return prediction.seconds.value - sent - prediction.of("optimizer")


def _activations(held: Memory) -> int:
    """Bytes at the peak that are neither persistent nor gradients; all gradients may exist at the peak."""
    return max(0, held.joint - held.parameters - held.optimizer - held.gradients)


def _stretched(seconds: float, once: float, stretch: float) -> float:
    """Seconds of which all but some are stretched by the waiting of stages."""
    return stretch * max(0.0, seconds - once) + min(seconds, once)


def unstaged(config: Config) -> Config:
    """The plan whose work the stages of `config` share, on as many times fewer ranks: they can do no less than that."""
    return replicated(in_turn(config))


def replicated(config: Config) -> Config:
    """The plan that differs from `config` only in that no parameters are sharded."""
    return replace(config, distribute_param="none", distribute_low_prec_param=False)


def in_turn(config: Config) -> Config:
    """The plan whose ranks run the stages of `config` one after the other, parameters sharded in the same way."""
    return replace(config, pp=1, schedule=Config().schedule, stage_shares=Config().stage_shares)


def flat(mesh: Config) -> Config:
    """The mesh with dp in place of stages."""
    return replace(mesh, dp=mesh.dp * mesh.pp, pp=1)


def least(config: Config) -> Config:
    """The plan on the same mesh, stages left out, that computes and sends least: whatever it needs in memory."""
    return replace(config.mesh, pp=1)


def work_of(config: Config, prediction: Prediction, memory: Memory, gradients: int) -> Work:
    """The work of a plan that has been priced, with so many gradients."""
    moved = PARAMETER_PASSES * config.micro_batches * (memory.parameters + memory.gradients)
    return Work(
        prediction.seconds.value,
        Parameters(gradients, moved, memory.gradients, prediction.of("optimizer")),
        prediction.of("overhead"),
        prediction.of("launch"),
        prediction.over_dp,
        memory if config.distribute_param == "none" else None,
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


def sharded_bytes(known: Config, memory: Memory, config: Config) -> int:
    """Lower bound on the peak of `config`, which shards other parameters than the plan `known` that needs `memory`."""
    if known.distribute_param == "use":
        return 0  # What it gathers for each use may be most of its peak.
    parameters = memory.parameters * (known.dp if known.distribute_param in GATHERING else 1)
    parts = 1 if known.distribute_param == "none" else known.dp
    optimizer, gradients = memory.optimizer * parts, memory.gradients * parts
    before = persistent(known, parameters, optimizer) + gathered(known, parameters, 0.0)
    after = persistent(config, parameters, optimizer)
    if config.micro_batches > 1:
        # A single micro-batch lets each parameter go that it has read; of several, the last one does.
        after += gathered(config, parameters - parameters / config.dp, 0.0)
    # Whether a gradient is whole at the peak, a share, or both is not known; two of the levels do the same with them.
    share = gradients / known.dp
    spared = share if config.distribute_param == "none" else gradients - share
    if {known.distribute_param, config.distribute_param} == {"optimizer", "step"}:
        spared = 0.0
    return int(ALIKE * (memory.joint - before + after - spared))


def alone(config: Config) -> Config:
    """The decisions of `config` that change how much one device computes and holds."""
    return Config(recompute=config.recompute, loss_chunks=config.loss_chunks)


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
