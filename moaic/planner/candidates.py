"""Enumerates the configurations worth compiling for a step, a number of workers and the user's request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil, prod
from typing import get_args

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Function, Module
from moaic.ir.sizes import Size
from moaic.ir.specialize import in_example
from moaic.passes.config import GATHERING, Config, Distribute, Recompute, Request, simplicity
from moaic.passes.schedules import SCHEDULES
from moaic.passes.sharding.context_parallel import lengths
from moaic.passes.sharding.data_parallel import batch_size, padded_rows
from moaic.passes.sharding.expert_parallel import experts_of
from moaic.passes.sharding.loss_chunks import logits_of
from moaic.passes.stage_shares import EQUAL, for_other_workers, parse_shares
from moaic.passes.transforms.hoist_casts import narrows
from moaic.planner.stage_speeds import Speeds
from moaic.text.units import MIB

FEW_ROWS = (1, 2, 4)
"""Rows of a micro-batch that are always among the candidates: where memory is short, some of them fit."""

MOST_PARTS = 64
"""Most micro-batches of a pipeline among the candidates, and most that are a power of two whatever their rows."""

MOST_IN_TURN = 4096
"""Most micro-batches without a pipeline among the candidates: to price a plan takes time for each."""

LONG = 4096
"""Tokens from which on the sequence may be split, however large the batch is."""

FEW_WORKERS = 16
"""Up to this many, stages and parts of weights may be of any number; with more they divide the workers, or by two."""

PADDED = 1.25
"""The most rows to which a batch is padded unasked, as a multiple of its own."""

WIDE = 64 * MIB
"""Bytes of logits per worker from which on the loss may be computed in chunks."""

CHUNKS = (1, 8)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the step says about its candidates."""

    rows: int
    pads: bool
    """Whether more rows can be added to the batch."""
    trains: bool
    experts: int
    """The fewest experts of a mixture."""
    sequence: int
    """The longest sequence that attention has."""
    casts: bool
    """Whether a parameter is cast to a narrower type."""
    chunks: Sequence[int]
    """Numbers of chunks of the loss."""
    speeds: Speeds | None
    """Of workers that are not equally fast."""


@dataclass(frozen=True, slots=True)
class CandidateSpace:
    """The candidates of a step, by their meshes: all on one mesh are enumerated only where one of them may be best."""

    facts: _Facts
    request: Request
    meshes: Sequence[Config]
    """Configurations that only say how many ranks each axis has, the simplest first."""
    rejected: frozenset[Config] = frozenset()
    """Configurations that are none of the candidates."""

    def without(self, rejected: Iterable[Config]) -> CandidateSpace:
        """The other candidates."""
        others = replace(self, rejected=frozenset(rejected))
        return replace(others, meshes=[mesh for mesh in self.meshes if others.count(mesh)])

    def on(self, mesh: Config) -> list[Config]:
        """The candidates on a mesh, the simplest first."""
        facts, request = self.facts, self.request
        found = [
            replace(
                each,
                recompute=mode,
                distribute_param=level,
                distribute_low_prec_param=low_precision,
                gather_keys=gather_keys,
                loss_chunks=chunks,
            )
            for each in self.in_parts(mesh)
            for mode in _recompute_modes(facts.trains, request)
            for level, low_precision in _distributions(mesh.dp, facts, request)
            for gather_keys in _gather_keys(mesh.cp, request)
            for chunks in facts.chunks
        ]
        return sorted((each for each in found if each not in self.rejected), key=simplicity)

    def simplest(self, mesh: Config) -> Config:
        """The first of the candidates on a mesh."""
        first = self._first(mesh)
        return self.on(mesh)[0] if first in self.rejected else first

    def _first(self, mesh: Config) -> Config:
        level, low_precision = next(_distributions(mesh.dp, self.facts, self.request))
        return replace(
            min(self.in_parts(mesh), key=simplicity),
            recompute=_recompute_modes(self.facts.trains, self.request)[0],
            distribute_param=level,
            distribute_low_prec_param=low_precision,
            gather_keys=_gather_keys(mesh.cp, self.request)[0],
            loss_chunks=self.facts.chunks[0],
        )

    def in_parts(self, mesh: Config) -> Iterator[Config]:
        """A mesh with every number of micro-batches into which the batch is split on it, in every order."""
        facts, request = self.facts, self.request
        for micro_batches in _micro_batches(mesh, facts, request):
            if self._splits(mesh.dp * micro_batches) and not self._could_split_rows(mesh, micro_batches):
                orders = _schedules(mesh.pp, micro_batches, facts.trains, request)
                for schedule, shares in product(orders, _stage_shares(mesh, facts, request)):
                    yield replace(mesh, micro_batches=micro_batches, schedule=schedule, stage_shares=shares)

    def _splits(self, parts: int) -> bool:
        """Whether the batch is split into so many parts: where it divides, or is padded by little or as asked."""
        asked = (self.request.dp or 1) * (self.request.micro_batches or 1)
        is_asked = asked == parts and _is_split(parts, self.facts.rows, pads=self.facts.pads)
        return is_asked or _is_padded_by_little(parts, self.facts)

    def _could_split_rows(self, mesh: Config, micro_batches: int) -> bool:
        """Whether ranks that share the sequences of some rows could have as many whole rows each, and less to send."""
        facts, request = self.facts, self.request
        asked = (request.cp, request.dp) != (None, None)
        return mesh.cp > 1 and not asked and facts.rows > 0 and _divides(2 * mesh.dp * micro_batches, facts.rows)

    def cheapest_levels(self, plan: Config) -> list[Config]:
        """A plan with each sharding of parameters that may take least: `use` gathers no less often than `step`."""
        levels = [*_distributions(plan.dp, self.facts, self.request)]
        steps = any(level == "step" for level, _ in levels)
        return [
            replace(plan, distribute_param=level, distribute_low_prec_param=low_precision)
            for level, low_precision in levels
            if level != "use" or not steps
        ]

    def count(self, mesh: Config) -> int:
        """How many candidates there are on a mesh."""
        facts, request = self.facts, self.request
        listed = (_recompute_modes(facts.trains, request), _gather_keys(mesh.cp, request), facts.chunks)
        drawn = (self.in_parts(mesh), _distributions(mesh.dp, facts, request))
        rejected = sum(each.mesh == mesh for each in self.rejected)
        return prod(len([*choices]) for choices in (*listed, *drawn)) - rejected

    @property
    def total(self) -> int:
        return sum(map(self.count, self.meshes))


def candidate_space(step: Module, workers: int, request: Request, speeds: Speeds | None = None) -> CandidateSpace:
    """The configurations that keep to `request`. Raises Diagnostic where there is none.

    Where workers are not equally fast, `speeds` says how much stages on them get. Where sizes are open, configurations
    are possible for those of the example.
    """
    pads = _can_pad(step)
    step = in_example(step)
    rows, trains = batch_size(step.main), is_training(step)
    check_request(step, workers, request)
    _check_batch(workers, rows, request, pads=pads)
    _check_shares(workers, rows, trains, request, pads=pads)
    experts, longest = min(experts_of(step), default=1), max(lengths(step), default=1)
    chunks = _chunks(step, workers, trains, request)
    facts = _Facts(rows, pads, trains, experts, longest, _casts_parameters(step.main), chunks, speeds)
    sizes = [workers] if speeds is None else speeds.prefixes(workers)
    meshes = {mesh for n in sizes for mesh in (*_meshes(facts, n, request), *_fullest(facts, n, request))}
    space = CandidateSpace(facts, request, sorted(meshes, key=simplicity))
    possible = space.without([])
    assert possible.meshes, f"{request} was found possible, and nothing keeps to it"
    return possible


def candidates(step: Module, workers: int, request: Request) -> list[Config]:
    """All configurations that keep to `request`, the simplest first. Raises Diagnostic where there is none."""
    space = candidate_space(step, workers, request)
    return sorted((config for mesh in space.meshes for config in space.on(mesh)), key=simplicity)


def is_training(step: Module) -> bool:
    return bool(step.main.gradients)


def relaxed(step: Module, request: Request) -> Request:
    """The request; for a step without gradients, without a split of the batch that is not possible."""
    return request if is_training(step) else fitting(step, request)


def fitting(step: Module, request: Request) -> Request:
    """The request, without dp and micro_batches if the batch of `step` cannot be split so."""
    if _is_split((request.dp or 1) * (request.micro_batches or 1), batch_size(step.main), pads=_can_pad(step)):
        return request
    return replace(request, dp=None, micro_batches=None)


def check_request(step: Module, workers: int, request: Request) -> None:
    """Raises Diagnostic where no batch could follow `request`, whatever its rows."""
    check_workers(workers, request)
    _check_distribution(workers, is_training(step), request)


def check_workers(workers: int, request: Request) -> None:
    """Raises Diagnostic where no step could follow `request` on so many workers."""
    _check_ranks(workers, request)
    _check_schedule(workers, request)
    _check_stage_shares(request)


def _meshes(facts: _Facts, workers: int, request: Request) -> Iterator[Config]:
    """The requested meshes, or those whose ranks divide the workers or are a power of two."""
    fixed = (request.pp, request.dp, request.tp) != (None, None, None)
    most = workers // ((request.cp or 1) * (request.ep or 1))
    for pp in [request.pp] if request.pp is not None else range(1, most + 1):
        for dp in [request.dp] if request.dp is not None else range(1, most // pp + 1):
            for tp in [request.tp] if request.tp is not None else range(1, most // (pp * dp) + 1):
                ranks = pp * dp * tp
                if ranks <= most and (fixed or _is_regular(ranks, most)):
                    yield from _with_experts_and_contexts(pp, dp, tp, facts, workers, request)


def _fullest(facts: _Facts, workers: int, request: Request) -> Iterator[Config]:
    """Meshes whose `dp` is the most that divides the batch, though some workers are left over.

    With them one more worker never makes a step slower: five rows on six workers are faster on five than on four.
    """
    if (request.pp, request.dp, request.tp) != (None, None, None):
        return
    divisors = _divisors(facts.rows, workers)
    sizes = [n for n in range(1, workers + 1) if workers <= FEW_WORKERS or _is_regular(n, workers)]
    for pp, tp in product(sizes, sizes):
        if pp * tp <= workers // ((request.cp or 1) * (request.ep or 1)):
            for mesh in _with_experts_and_contexts(pp, 1, tp, facts, workers, request):
                yield replace(mesh, dp=divisors[bisect_right(divisors, workers // mesh.ranks) - 1])


def _with_experts_and_contexts(
    pp: int, dp: int, tp: int, facts: _Facts, workers: int, request: Request
) -> Iterator[Config]:
    for ep in _expert_parts(facts, workers // (request.cp or 1), pp * dp * tp, request):
        for cp in _contexts(facts, workers, pp * dp * tp * ep, request):
            yield Config(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)


def _is_regular(ranks: int, workers: int) -> bool:
    return workers % ranks == 0 or ranks & (ranks - 1) == 0


def _expert_parts(facts: _Facts, workers: int, others: int, request: Request) -> Sequence[int]:
    """Values of ep beside `others` ranks: powers of two that divide the experts; only 1 where there are none."""
    if request.ep is not None:
        return [request.ep]
    powers = (1 << power for power in range(1, facts.experts.bit_length()))
    return [1, *(n for n in powers if others * n <= workers and facts.experts % n == 0)]


def _contexts(facts: _Facts, workers: int, others: int, request: Request) -> Sequence[int]:
    """Values of cp beside `others` ranks: more than 1 for long sequences, and for fewer rows than workers."""
    if request.cp is not None:
        return [request.cp]
    if facts.sequence < LONG and facts.rows >= workers:
        return [1]
    powers = (1 << power for power in range(1, (workers // others).bit_length()))
    return [1, *(n for n in powers if others * n <= workers and facts.sequence % n == 0)]


def _gather_keys(cp: int, request: Request) -> Sequence[bool]:
    """Values of gather_keys: without a split of the sequence the option has no effect, and is True."""
    if cp == 1:
        return [True]
    return [True, False] if request.gather_keys is None else [request.gather_keys]


def _distributions(dp: int, facts: _Facts, request: Request) -> Iterator[tuple[Distribute, bool]]:
    """Levels of sharding parameters, and whether they are gathered in low precision."""
    for level in _levels(dp, facts.trains, request):
        for low_precision in _low_precision(facts, level, request):
            yield level, low_precision


def _schedules(pp: int, micro_batches: int, trains: bool, request: Request) -> Sequence[str]:
    """Schedules of a pipeline; gpipe only on request, as 1f1b is as fast and keeps less.

    A pipeline of fewer micro-batches than stages is a candidate only on request, as some worker always waits.
    """
    if pp == 1:
        return [Config().schedule] if request.schedule is None else []
    if request.schedule is not None:
        return [request.schedule]
    if micro_batches < pp:
        return [Config().schedule] if request.pp is not None else []
    return [name for name in SCHEDULES if name != "gpipe"] if trains else [Config().schedule]


def _stage_shares(mesh: Config, facts: _Facts, request: Request) -> Sequence[str]:
    if request.stage_shares is not None:
        return [request.stage_shares]
    return [EQUAL] if facts.speeds is None else facts.speeds.shares(mesh)


def _micro_batches(mesh: Config, facts: _Facts, request: Request) -> Sequence[int]:
    if request.micro_batches is not None:
        return [request.micro_batches]
    powers = [1 << power for power in range(MOST_PARTS.bit_length())]
    by_rows = [min(MOST_IN_TURN, ceil(facts.rows / (mesh.dp * rows))) for rows in FEW_ROWS] if facts.rows else []
    return sorted({*powers, *(parts for parts in by_rows if mesh.pp == 1 or parts <= MOST_PARTS)})


def _recompute_modes(trains: bool, request: Request) -> Sequence[Recompute]:
    if request.recompute is not None:
        return [request.recompute]
    return get_args(Recompute) if trains else ["saved"]


def _levels(dp: int, trains: bool, request: Request) -> Sequence[Distribute]:
    if not trains:
        return [(request.distribute_param if dp > 1 else None) or "none"]
    if request.distribute_param is not None:
        return [request.distribute_param] if dp > 1 or request.distribute_param == "none" else []
    if request.distribute_low_prec_param:
        return GATHERING if dp > 1 else []
    return get_args(Distribute) if dp > 1 else ["none"]


def _chunks(step: Module, workers: int, trains: bool, request: Request) -> Sequence[int]:
    """Numbers of chunks of the loss: more than 1 for large logits that are no output of the step."""
    if not trains or request.loss_chunks is not None:
        return [request.loss_chunks or 1] if trains else [1]
    logits = logits_of(step.main)
    return CHUNKS if logits is not None and logits.type.nbytes() >= WIDE * workers else [1]


def _low_precision(facts: _Facts, level: Distribute, request: Request) -> Sequence[bool]:
    """Whether parameters are gathered after their cast: only where one is cast to a narrower type."""
    if level not in GATHERING:
        return [False]
    if request.distribute_low_prec_param is not None:
        return [request.distribute_low_prec_param]
    return [False, True] if facts.casts else [False]


def _casts_parameters(main: Function) -> bool:
    params = {param for i, param in enumerate(main.params) if main.param_role(i).kind == "param"}
    return any(narrows(op) and op.operands[0] in params for op in main.ops)


def _check_ranks(workers: int, request: Request) -> None:
    axes = (("pp", request.pp), ("dp", request.dp), ("ep", request.ep), ("cp", request.cp), ("tp", request.tp))
    asked = [(name, n) for name, n in axes if n is not None]
    ranks = prod(n or 1 for _, n in axes)
    if ranks > workers:
        names = " with ".join(f"{name}={n}" for name, n in asked if n > 1)
        raise Diagnostic(
            f"{names} needs {ranks} workers, there {_are(workers)}",
            hint=f"ask for at most {workers}, or for more workers: a program by MOAI_FLAVOR or torch.moai.set_flavor, "
            "a command by its options",
        )


def _check_batch(workers: int, rows: int, request: Request, *, pads: bool) -> None:
    dp, parts = request.dp or 1, request.micro_batches or 1
    if _is_split(dp * parts, rows, pads=pads):
        return
    if pads:
        names = " with ".join(f"{name}={n}" for name, n in (("dp", dp), ("micro_batches", parts)) if n > 1)
        raise Diagnostic(f"{names} makes {dp * parts} parts of a batch of {rows}: at most {max(1, rows)} are possible")
    if not _divides(parts, rows):
        raise Diagnostic(f"micro_batches={parts} does not divide a batch of {rows}: {_would(_divisors(rows))}")
    if not _divides(dp, rows):
        raise Diagnostic(f"dp={dp} does not divide a batch of {rows}: {_would(_divisors(rows, workers))}")
    if not _divides(dp * parts, rows):
        raise Diagnostic(
            f"dp={dp} with micro_batches={parts} does not divide a batch of {rows} into {dp * parts} equal parts: "
            f"with dp={dp}, micro_batches of {_would(_divisors(rows // dp))}"
        )


def _check_distribution(workers: int, trains: bool, request: Request) -> None:
    level = request.distribute_param
    if request.distribute_low_prec_param and level in ("none", "optimizer"):
        raise Diagnostic(
            f"distribute_low_prec_param is about gathered parameters: distribute_param={level} gathers none",
            hint="ask for distribute_param=step or distribute_param=use with it",
        )
    if not _distributes(trains, request):
        return
    wanted = _wanted_distribution(request)
    if request.dp == 1:
        raise Diagnostic(f"{wanted} shares parameters out over dp, and dp=1 leaves no one to share with")
    beside_dp = (("pp", request.pp), ("ep", request.ep), ("cp", request.cp), ("tp", request.tp))
    taken = _stages(request) * prod(n or 1 for _, n in beside_dp[1:])
    if workers // taken < 2:
        others = [f"{name}={n}" for name, n in beside_dp if n]
        others += [f"schedule={request.schedule}"] if request.schedule and not request.pp else []
        beside = f" with {' and '.join(others)}" if others else ""
        raise Diagnostic(
            f"{wanted} shares parameters out over dp, which{beside} needs {2 * taken} workers, there {_are(workers)}"
        )


def _check_shares(workers: int, rows: int, trains: bool, request: Request, *, pads: bool) -> None:
    """Raises Diagnostic where parameters are to be sharded over an open `dp`, and no dp splits the rows."""
    if request.dp is not None or not _distributes(trains, request):
        return
    most = workers // (_stages(request) * prod(n or 1 for n in (request.ep, request.cp, request.tp)))
    parts = request.micro_batches or 1
    if not any(_is_split(dp * parts, rows, pads=pads) for dp in range(2, most + 1)):
        raise Diagnostic(
            f"{_wanted_distribution(request)} shares parameters out over dp, and no dp from 2 to {most} splits a "
            f"batch of {rows}" + (f" in {parts} micro-batches" if parts > 1 else "")
        )


def _distributes(trains: bool, request: Request) -> bool:
    asked = request.distribute_param not in (None, "none") or request.distribute_low_prec_param
    return trains and bool(asked)


def _wanted_distribution(request: Request) -> str:
    level = request.distribute_param
    return f"distribute_param={level}" if level else "distribute_low_prec_param"


def _check_schedule(workers: int, request: Request) -> None:
    if request.schedule is not None and (request.pp == 1 or workers == 1):
        why = "pp=1 has one stage" if request.pp == 1 else "one worker runs no pipeline"
        raise Diagnostic(f"schedule={request.schedule} orders the stages of a pipeline, and {why}")
    beside_pp = (("dp", request.dp), ("ep", request.ep), ("cp", request.cp), ("tp", request.tp))
    needed = _stages(request) * prod(n or 1 for _, n in beside_pp)
    if needed > workers:
        others = " and ".join(f"{name}={n}" for name, n in beside_pp if n)
        raise Diagnostic(
            f"schedule={request.schedule} orders the stages of a pipeline, which with {others} needs {needed} workers, "
            f"there {_are(workers)}"
        )


def _check_stage_shares(request: Request) -> None:
    if request.stage_shares in (None, EQUAL):
        return
    shares, stages = len(parse_shares(request.stage_shares)), request.pp or 1
    if shares != stages or shares == 1:
        raise for_other_workers(request.stage_shares, stages)


def _stages(request: Request) -> int:
    """The fewest stages that a request can mean: a schedule is one of at least two."""
    return request.pp or (2 if request.schedule else 1)


def _are(workers: int) -> str:
    return "is 1" if workers == 1 else f"are {workers}"


def _divisors(rows: int, most: int | None = None) -> list[int]:
    return [n for n in range(1, min(rows or 1, most or rows or 1) + 1) if _divides(n, rows)]


def _can_pad(step: Module) -> bool:
    """Whether rows can be added to the batch of `step`: its size is no open one."""
    return not isinstance(batch_size(step.main), Size)


def _is_split(parts: int, rows: int, *, pads: bool) -> bool:
    """Whether a batch can be split into so many parts, padded if need be."""
    return _divides(parts, rows) or (pads and parts <= rows)


def _is_padded_by_little(parts: int, facts: _Facts) -> bool:
    is_little = padded_rows(facts.rows, parts) <= PADDED * facts.rows
    return _divides(parts, facts.rows) or (facts.pads and parts <= facts.rows and is_little)


def _divides(parts: int, rows: int) -> bool:
    """Whether all parts get the same number of rows; no rows divide as one row does."""
    return (rows or 1) % parts == 0


def _would(numbers: Sequence[int]) -> str:
    *rest, last = map(str, numbers)
    return f"{', '.join(rest)} or {last} would" if rest else f"{last} would"
