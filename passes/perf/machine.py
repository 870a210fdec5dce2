"""The machine as the planner sees it: rates and prices, each with its source."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any

from moaic.ir.collectives import sent_share
from moaic.ir.errors import Diagnostic
from moaic.ir.layout import Mesh
from moaic.ir.types import DTYPE_BYTES, FLOAT8, TensorType


class MeasureSource(IntEnum):
    """The source of a number, the best first. A result of several numbers has the worst of their sources."""

    MEASURED = 0
    INTERPOLATED = 1
    """Measured for another dtype, size or number of ranks."""
    PUBLISHED = 2
    """From the vendor's data sheet: a peak."""
    ASSUMED = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Number:
    """A value and its source."""

    value: float
    source: MeasureSource = MeasureSource.ASSUMED

    def worse(self, source: MeasureSource) -> Number:
        """This number, its source no better than `source`."""
        return Number(self.value, max(self.source, source))

    def times(self, count: int) -> Number:
        return Number(count * self.value, self.source)

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.source})"


ZERO = Number(0.0, MeasureSource.MEASURED)


def total(numbers: Iterable[Number]) -> Number:
    """The sum, with the worst source among the numbers that are not zero."""
    value, source = 0.0, MeasureSource.MEASURED
    for number in numbers:
        value += number.value
        if number.value:
            source = max(source, number.source)
    return Number(value, source)


@dataclass(frozen=True, slots=True)
class Link:
    """Cost of a collective in a group of `ranks`: latency in seconds, rate in bytes of its larger side per second."""

    latency: Number
    rate: Number
    ranks: int
    direct: bool = False
    """Every pair of ranks has a link of its own: a smaller group uses fewer of them."""

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        """Seconds of a collective over a group of `ranks`, each of which holds `nbytes` of the larger side."""
        more = _sent_share(kind, ranks) / _sent_share(kind, self.ranks)
        links = (ranks - 1) / (self.ranks - 1) if self.direct else 1.0
        return self.latency.value + more * nbytes / (links * self.rate.value)


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
class Machine:
    """A set of equal workers. Rates are those of one worker while all of them are busy."""

    workers: int
    memory: int
    """Bytes that one worker may use."""
    bandwidth: Number
    """Bytes per second."""
    flops: Mapping[str, Number]
    """Floating-point operations per second, by `family.dtype`: mm.f32, mm.bf16, mm.f8, sdpa.f32, cheap.f32 …"""
    links: Mapping[str, Link] = field(default_factory=dict[str, Link])
    """By name of the collective, without `moai.`; `send` is from one worker to another."""
    call_overhead: Number = Number(20e-6)
    """Seconds of overhead per instruction."""
    name: str = ""
    launch: Number = ZERO
    """Seconds from one kernel of a function to the next."""
    overlaps: bool = False
    """Whether a worker computes while a collective runs, as GPUs do."""
    made: Mapping[str, tuple[MadeKernel, ...]] = field(default_factory=dict[str, tuple[MadeKernel, ...]])
    """Generated kernels of functions, by `key_of` the function: more exact than `fusion` where they are known."""

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

    def collective(self, kind: str, nbytes: float, ranks: int) -> Number:
        """Seconds of one collective over a group of `ranks`; `nbytes` is what a rank holds of the larger side."""
        link = self.links.get(kind)
        if link is None:
            seconds = ASSUMED_LATENCY + ASSUMED_PASSES * _sent_share(kind, ranks) * nbytes / self.bandwidth.value
            return Number(seconds, MeasureSource.ASSUMED)
        source = max(link.latency.source, link.rate.source)
        known = source if link.ranks == ranks else max(source, MeasureSource.INTERPOLATED)
        return Number(link.seconds(kind, nbytes, ranks), known)


def _sent_share(kind: str, ranks: int) -> float:
    """`sent_share` of a link's name, which is a collective's without `moai.`, or `send`."""
    return sent_share(f"moai.{kind}", ranks)


def larger_side(before: TensorType, after: TensorType, mesh: Mesh) -> int:
    """Bytes of the larger of a collective's two sides on one rank."""
    return max(before.local_nbytes(mesh), after.local_nbytes(mesh))


def to_text(machine: Machine) -> str:
    """JSON, in the form that `from_text` reads."""
    return json.dumps(
        {
            "name": machine.name,
            "workers": machine.workers,
            "memory": machine.memory,
            "bandwidth": _number_out(machine.bandwidth),
            "call_overhead": _number_out(machine.call_overhead),
            "launch": _number_out(machine.launch),
            "overlaps": machine.overlaps,
            "flops": {key: _number_out(number) for key, number in sorted(machine.flops.items())},
            "links": {kind: _link_out(link) for kind, link in sorted(machine.links.items())},
            "made": {key: [astuple(kernel) for kernel in kernels] for key, kernels in sorted(machine.made.items())},
        },
        indent=1,
    )


def from_text(text: str, name: str = "this") -> Machine:
    """Raises Diagnostic, which names the text, where a number is missing or is none."""
    try:
        data = json.loads(text)
        return Machine(
            name=str(data.get("name", "")),
            workers=int(data["workers"]),
            memory=int(data["memory"]),
            bandwidth=_number_in(data["bandwidth"]),
            call_overhead=_number_in(data["call_overhead"]),
            flops={str(key): _number_in(number) for key, number in data["flops"].items()},
            launch=_number_in(data["launch"]) if "launch" in data else ZERO,
            overlaps=bool(data.get("overlaps", False)),
            links={str(kind): _link_in(link) for kind, link in data.get("links", {}).items()},
            made={
                str(key): tuple(MadeKernel(*kernel) for kernel in kernels)
                for key, kernels in data.get("made", {}).items()
            },
        )
    except KeyError as error:
        raise Diagnostic(f"{name} does not describe a machine: it has no {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise Diagnostic(f"{name} does not describe a machine: {error}") from error


def _link_out(link: Link) -> dict[str, object]:
    ends = {"latency": _number_out(link.latency), "rate": _number_out(link.rate)}
    return {**ends, "ranks": link.ranks, "direct": link.direct}


def _link_in(data: Mapping[str, Any]) -> Link:
    latency, rate = _number_in(data["latency"]), _number_in(data["rate"])
    return Link(latency, rate, int(data["ranks"]), bool(data.get("direct", False)))


def _number_out(number: Number) -> list[float | str]:
    return [number.value, str(number.source)]


def _number_in(pair: list[float | str]) -> Number:
    value, source = pair
    return Number(float(value), MeasureSource[str(source).upper()])
