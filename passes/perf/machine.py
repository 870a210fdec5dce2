"""The machine as the planner sees it: rates and prices, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import Any

from moaic.ir.collectives import sent_share
from moaic.ir.layout import Mesh
from moaic.ir.types import DTYPE_BYTES, FLOAT8, TensorType
from moaic.passes.perf.links import Level, Link, RankGroup, message_over, seconds_over
from moaic.passes.perf.numbers import ZERO, MeasureSource, Number


@dataclass(frozen=True, slots=True)
class MadeKernel:
    """A kernel that the compiler generated for a function: bytes and FLOPs of one of its `calls` per run."""

    calls: int
    nbytes: float
    flops: float
    heavy: str | None = None
    """The dtype of the matrix product that it is, if it is one."""


ASSUMED_LATENCY = 50e-6
"""Seconds."""

ASSUMED_OVERHEAD = Number(20e-6)
"""Seconds."""

LIGHT = frozenset({"cheap", "costly"})
"""Families of ops that Inductor fuses: arithmetic, and functions such as exp."""

SUBSTITUTES: Mapping[str, str] = {"sdpa_backward": "sdpa", "convolution_backward": "convolution"}
"""Families that run about as fast as another."""

ASSUMED_EFFICIENCY: Mapping[str, float] = {
    "mm": 1.0,
    "sdpa": 0.35,
    "sdpa_backward": 0.35,
    "convolution": 0.6,
    "convolution_backward": 0.6,
}
"""Share of the matmul rate assumed for heavy ops that were not measured."""

ASSUMED_PASSES = 3.0
"""Times that a collective through shared memory reads or writes each byte that it sends."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """What describes consecutive workers of a machine whose workers are not all equal, as in `Machine`."""

    name: str
    workers: int
    memory: int
    bandwidth: Number
    flops: Mapping[str, Number]
    call_overhead: Number
    launch: Number
    contention: float
    overlaps: bool
    adds_traffic: bool


@dataclass(frozen=True, slots=True)
class Machine:
    """A set of workers. Rates are those of one worker, the slowest of them, while all of them are busy."""

    workers: int
    memory: int
    """Bytes that one worker may use."""
    bandwidth: Number
    """Bytes per second."""
    flops: Mapping[str, Number]
    """Floating-point operations per second, by `family.dtype`: mm.f32, mm.bf16, mm.f8, sdpa.f32, cheap.f32 …"""
    links: Mapping[str, Link] = field(default_factory=dict[str, Link])
    """By name of the collective, without `moai.`; `send` is from one worker to another. Inside the first level."""
    call_overhead: Number = ASSUMED_OVERHEAD
    """Seconds of overhead per instruction."""
    name: str = ""
    launch: Number = ZERO
    """Seconds from one kernel of a function to the next."""
    overlaps: bool = False
    """Whether a worker computes while a collective runs, as GPUs do."""
    contention: float = 0.0
    """Seconds of computing that each second of a collective beside it costs: both use the memory, and cores."""
    stream_per_axis: bool = False
    """Whether collectives over different axes run at once; moaic's own follow each other on one stream."""
    adds_traffic: bool = False
    """Whether arithmetic and traffic of a heavy kernel add up, as on GPUs, whose tiles load before they multiply."""
    causal_block: int = 0
    """Keys that a kernel of causal attention reads or skips at once; 0 where it is as good as any."""
    levels: tuple[Level, ...] = ()
    """The levels of its links, the innermost first; the last joins all workers."""
    made: Mapping[str, tuple[MadeKernel, ...]] = field(default_factory=dict[str, tuple[MadeKernel, ...]])
    """Generated kernels of functions, by `key_of` the function: more exact than `fusion` where they are known."""
    kernels: Mapping[str, Number] | None = None
    """Seconds of heavy ops that were measured in exactly these sizes, by `kernel_text`."""

    kinds: tuple[WorkerKind, ...] = ()
    """The kinds of its workers in order, the fastest first, where they are not all equal; more are like the last."""

    @property
    def by_kind(self) -> list[Machine]:
        """For each kind of worker, as many workers as this machine has, all of that kind."""
        return [replace(self, kinds=(), **_described(kind)) for kind in self.kinds] or [self]

    def slowest_kind(self, ranks: range) -> int:
        """The place in `by_kind` of the slowest kind among these workers."""
        return self._kind_of(ranks[-1])

    def least_memory(self, ranks: range) -> int:
        """Bytes that each of these workers may use."""
        kinds = self.kinds[self._kind_of(ranks[0]) : self._kind_of(ranks[-1]) + 1]
        return min((kind.memory for kind in kinds), default=self.memory)

    def _kind_of(self, rank: int) -> int:
        ends = accumulate(kind.workers for kind in self.kinds[:-1])
        return next((kind for kind, end in enumerate(ends) if rank < end), max(0, len(self.kinds) - 1))

    def all_memory(self, workers: int) -> int:
        """Bytes that its first workers may use together."""
        total = 0
        for kind in self.kinds[:-1]:
            total += min(workers, kind.workers) * kind.memory
            workers = max(0, workers - kind.workers)
        return total + workers * (self.kinds[-1].memory if self.kinds else self.memory)

    @property
    def most_memory(self) -> int:
        """Bytes that the workers with the most memory may use."""
        return max([self.memory, *(kind.memory for kind in self.kinds)])

    def rate(self, family: str, dtype: str) -> Number:
        """FLOPs per second of a family of ops in a dtype; for light ops results per second."""
        for name in (family, SUBSTITUTES.get(family, family)):
            if (rate := self.flops.get(f"{name}.{dtype}")) is not None:
                return rate if name == family else rate.worse(MeasureSource.INTERPOLATED)
        if family in LIGHT:
            # Light ops compute in float32 whatever the dtype; unmeasured ones hide behind the memory traffic.
            wide = self.flops.get(f"{family}.f32")
            return (
                Number(float("inf"), MeasureSource.ASSUMED) if wide is None else wide.worse(MeasureSource.INTERPOLATED)
            )
        return Number(self._matmul(dtype).value * ASSUMED_EFFICIENCY[family], MeasureSource.ASSUMED)

    def causal_share(self, keys: int) -> float:
        """What a kernel of causal attention over `keys` computes, relative to the half that it must."""
        return 1 + min(self.causal_block, keys) / keys

    def slowdown(self, dtype: str) -> float:
        """The time of a matrix product in this type, relative to that in float32."""
        return self.rate("mm", "f32").value / self.rate("mm", dtype).value

    def _matmul(self, dtype: str) -> Number:
        """The rate of matrix products; an unmeasured dtype is as fast as float32, and slower where it is wider."""
        wide, known = self.flops["mm.f32"], "f8" if dtype in FLOAT8 else dtype
        return self.flops.get(f"mm.{known}", Number(wide.value / max(1, DTYPE_BYTES[dtype] // DTYPE_BYTES["f32"])))

    def seconds_to_move(self, nbytes: float) -> Number:
        """Seconds to read or write `nbytes` once."""
        return Number(nbytes / self.bandwidth.value, self.bandwidth.source)

    def stream(self, axis: str) -> str:
        """The name of the stream of collectives over an axis."""
        return axis if self.stream_per_axis else ""

    def collective(self, kind: str, nbytes: float, group: RankGroup) -> Number:
        """Seconds of one collective over a group of ranks; `nbytes` is what a rank holds of the larger side."""
        link = self.links.get(kind)
        is_inside = not self.levels or group.is_inside(self.levels[0].workers)
        if link is not None and is_inside:
            source = max(link.latency.source, link.rate.source)
            known = source if link.ranks == group.ranks else max(source, MeasureSource.INTERPOLATED)
            return Number(link.seconds(kind, nbytes, group.ranks), known)
        if self.levels:
            return seconds_over(self.levels, kind, nbytes, group)
        seconds = (
            ASSUMED_LATENCY + ASSUMED_PASSES * sent_share(f"moai.{kind}", group.ranks) * nbytes / self.bandwidth.value
        )
        return Number(seconds, MeasureSource.ASSUMED)

    def message(self, nbytes: float, is_inside: Callable[[int], bool]) -> Number:
        """Seconds of a message; `is_inside` says whether so many consecutive workers have both ends.

        Where no link is known for it, it takes as long as an all-gather of two ranks that have half of the bytes each.
        """
        is_near = not self.levels or is_inside(self.levels[0].workers)
        if "send" in self.links and is_near:
            return self.collective("send", nbytes, RankGroup(2))
        if self.levels and not (is_near and "all_gather" in self.links):
            return message_over(self.levels, nbytes, is_inside)
        return self.collective("all_gather", 2 * nbytes, RankGroup(2))


def _described(kind: WorkerKind) -> dict[str, Any]:
    return {each.name: getattr(kind, each.name) for each in fields(kind) if each.name != "workers"}


def larger_side(before: TensorType, after: TensorType, mesh: Mesh) -> int:
    """Bytes of the larger of a collective's two sides on one rank."""
    return max(before.local_nbytes(mesh), after.local_nbytes(mesh))
