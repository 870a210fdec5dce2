"""Seconds of collectives: over links that were measured, or level by level over those of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, gcd, log2

from moaic.ir.collectives import PASSES_SENT, sent_share
from moaic.ir.layout import Mesh
from moaic.ir.op_names import ALL_REDUCE, ALL_TO_ALL
from moaic.passes.perf.numbers import ZERO, MeasureSource, Number


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks along an axis: their number, and how far apart neighbours are in the order of all ranks."""

    ranks: int
    stride: int = 1
    all_ranks: int = 0
    """Ranks of the whole mesh; those of this group alone if 0."""

    def inside(self, workers: int) -> int:
        """Ranks that are together in each unit of `workers`; where groups cross borders, in the worst of them."""
        if max(self.all_ranks, self.ranks * self.stride) <= workers:
            return self.ranks
        return gcd(self.ranks, workers // self.stride) if workers % self.stride == 0 else 1

    def is_inside(self, workers: int) -> bool:
        """Whether every such group is in one unit of `workers`."""
        return self.inside(workers) == self.ranks


def group_along(axis: str, mesh: Mesh) -> RankGroup:
    """The groups of ranks along an axis: all are alike."""
    stride = 1
    for other, size in reversed(mesh.axes):
        if other == axis:
            return RankGroup(size, stride, mesh.ranks)
        stride *= size
    return RankGroup(1, stride, mesh.ranks)


def are_inside(axis: str, ends: tuple[int, int], mesh: Mesh) -> Callable[[int], bool]:
    """Whether two coordinates on an axis are, for all ranks that have them, in one unit of so many workers.

    Ranks with one coordinate follow each other in the order of all ranks if no axis is outside this one, as of `pp`.
    """
    stride = group_along(axis, mesh).stride
    first, last = min(ends) * stride, (max(ends) + 1) * stride - 1
    return lambda workers: first // workers == last // workers


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
class Level:
    """The links between units of a cluster: the workers of a package, the packages of a host, hosts.

    `workers` are those of one unit of this level, whose workers are numbered one after the other.
    """

    name: str
    workers: int
    latency: Number
    """Seconds of one message."""
    rate: Number
    """Bytes per second that each worker sends while all of them do, in one direction."""
    direct: bool = False
    """Every pair of the units that it joins has a link of its own: a group of fewer units uses fewer of them."""


@dataclass(frozen=True, slots=True)
class _Hop:
    """What a group sees of one level: the units of the level below that it is in, and the ranks in each of them."""

    units: float
    below: int
    latency: float
    rate: float
    """Bytes per second that the ranks of one unit send together."""
    source: MeasureSource


def seconds_over(levels: Sequence[Level], kind: str, nbytes: float, group: RankGroup) -> Number:
    """Seconds of a collective, `nbytes` of whose larger side each rank holds, by the algorithm that takes least.

    A ring sends everything through the slowest level once; level by level, each level sends its own share, in fewer
    messages.
    """
    if group.ranks == 1:
        return ZERO
    hops = [*_hops(levels, group)]
    source = max((hop.source for hop in hops), default=MeasureSource.MEASURED)
    if f"moai.{kind}" == ALL_TO_ALL:
        return Number(_to_all(hops, nbytes, group), source)
    passes = PASSES_SENT[f"moai.{kind}"]
    return Number(passes * min(_ring(hops, nbytes, group), _by_level(hops, nbytes, kind)), source)


def message_over(levels: Sequence[Level], nbytes: float, is_inside: Callable[[int], bool]) -> Number:
    """Seconds of one message over the first level in one unit of which both ends are; the last has everything."""
    below = 1
    for level in levels:
        if is_inside(level.workers) or level is levels[-1]:
            links = level.workers / below - 1 if level.direct else 1.0
            seconds = level.latency.value + nbytes * links / level.rate.value
            return Number(seconds, max(level.latency.source, level.rate.source))
        below = level.workers
    raise AssertionError("a cluster has a level of links")


def _hops(levels: Sequence[Level], group: RankGroup) -> Iterator[_Hop]:
    """The levels over which the group sends, the innermost first."""
    below, units_below = 1, 1
    for level in levels:
        inside = group.ranks if level is levels[-1] else group.inside(level.workers)
        if inside > below:
            units = inside / below
            most = level.workers / units_below
            share = (units - 1) / (most - 1) if level.direct else 1.0
            source = max(level.latency.source, level.rate.source)
            yield _Hop(units, below, level.latency.value, below * share * level.rate.value, source)
        below, units_below = inside, level.workers


def _ring(hops: Sequence[_Hop], nbytes: float, group: RankGroup) -> float:
    """Seconds of one pass around all ranks; between two units there are as many rings as ranks in each."""
    sent = nbytes * (group.ranks - 1) / group.ranks
    messages, units = 0.0, 1.0
    for hop in reversed(hops):
        messages += units * (hop.units - 1) * hop.latency
        units *= hop.units
    return max(sent / hop.rate for hop in hops) + messages


def _by_level(hops: Sequence[_Hop], nbytes: float, kind: str) -> float:
    """Seconds of one pass level by level: the ranks of a unit share out what it exchanges with other units.

    An all-reduce may go along a tree at each level, whose depth is the number of its messages.
    """
    seconds = 0.0
    for hop in hops:
        messages = ceil(log2(hop.units)) if f"moai.{kind}" == ALL_REDUCE else ceil(hop.units) - 1
        seconds += nbytes * (hop.units - 1) / hop.units / hop.rate + messages * hop.latency
    return seconds


def _to_all(hops: Sequence[_Hop], nbytes: float, group: RankGroup) -> float:
    """Seconds of an exchange: each rank sends every other its part over their common level; the slowest ends last."""
    return max(
        hop.below * nbytes * hop.below * (hop.units - 1) / group.ranks / hop.rate + (hop.units - 1) * hop.latency
        for hop in hops
    )


def _sent_share(kind: str, ranks: int) -> float:
    """`sent_share` of a link's name, which is a collective's without `moai.`, or `send`."""
    return sent_share(f"moai.{kind}", ranks)
