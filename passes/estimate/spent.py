"""Seconds of every worker of a step whose instructions are those of an excerpt, by the rules of `simulate`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moaic.ir.collectives import COMMUNICATING
from moaic.ir.op_names import SEND
from moaic.passes.estimate.per_rank import ends_of
from moaic.passes.estimate.sequence import WHOLE, Instruction, Instructions
from moaic.passes.estimate.step_time import Rates, op_seconds, stream_of
from moaic.passes.perf.numbers import MeasureSource, Number, total


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one worker."""

    parts: Mapping[str, Number]
    end: float
    """Seconds from the begin of the step to the end of its last instruction."""
    exposed: Number
    """Seconds of waiting for asynchronous collectives, or lost to them."""
    over_dp: float
    """Seconds of collectives over `dp`, exposed or not."""
    once: float
    """Seconds of all that does not run for each micro-batch, and what it costs the rest."""


def spent_by(step: Instructions, order: Sequence[Instruction], rates: Sequence[Rates]) -> list[Spent]:
    """Seconds of every worker along `pp`, which have these rates."""
    module = step.excerpt.joint
    functions = {function.name: function for function in module.functions}
    unique = {id(each): each for each in rates}
    prices = {
        kind: [op_seconds(op, module.mesh, functions, each.machine, each.seconds) for op in step.ops]
        for kind, each in unique.items()
    }
    seconds = {kind: [total(price.values()).value for price in of_ops] for kind, of_ops in prices.items()}
    streams = {kind: [stream_of(op, each.machine) for op in step.ops] for kind, each in unique.items()}
    kinds = [id(each) for each in rates]
    contention = [each.machine.contention for each in rates]
    clocks = _Times(step, [seconds[kind] for kind in kinds], [streams[kind] for kind in kinds], contention)
    clocks.run(order)
    runs = Counter(index for index, _ in order)
    return [_spent(worker, step, prices[kinds[worker]], runs, clocks) for worker in range(step.mesh.size("pp"))]


def _spent(
    worker: int,
    step: Instructions,
    prices: Sequence[Mapping[str, Number]],
    runs: Mapping[int, int],
    clocks: _Times,
) -> Spent:
    parts: dict[str, list[Number]] = defaultdict(list)
    over_dp = once = 0.0
    streams = clocks.streams[worker]
    for index, price in enumerate(prices):
        if worker not in step.workers[index]:
            continue
        if step.parts[index] == WHOLE:
            slowed = 0.0 if streams[index] is None else clocks.contention[worker]
            once += (1 + slowed) * total(price.values()).value
        if step.ops[index].name in COMMUNICATING and step.ops[index].attrs["axis"] == "dp":
            over_dp += runs[index] * total(price.values()).value
        if streams[index] is not None:
            continue
        share = 0.5 if step.ops[index].name == SEND else 1
        for part, number in price.items():
            parts[part].append(Number(runs[index] * share * number.value, number.source))
    pairs = zip(prices, streams, strict=True)
    waits = [price["collective"].source for price, stream in pairs if stream is not None]
    exposed = Number(clocks.exposed[worker], max(waits, default=MeasureSource.MEASURED))
    totals = {part: total(numbers) for part, numbers in parts.items()}
    return Spent(totals, clocks.clock[worker], exposed, over_dp, once)


class _Times:
    """The times of workers and values: the rules of `simulate`."""

    def __init__(
        self,
        step: Instructions,
        seconds: Sequence[Sequence[float]],
        streams: Sequence[Sequence[str | None]],
        contention: Sequence[float],
    ) -> None:
        self.step = step
        self.seconds = seconds
        """By worker and position."""
        self.streams = streams
        """By worker and position, the stream of an asynchronous instruction."""
        self.contention = contention
        workers = range(step.mesh.size("pp"))
        self.clock = [0.0 for _ in workers]
        self.asynchronous: dict[tuple[int, str], float] = defaultdict(float)
        self.exposed = [0.0 for _ in workers]
        self.ready: dict[tuple[Instruction, int], float] = {}
        """When the result of a send or of an asynchronous instruction exists on a worker."""
        asynchronous = {index for each in streams for index, stream in enumerate(each) if stream is not None}
        awaited = asynchronous | {index for index, op in enumerate(step.ops) if op.name == SEND}
        self.waited = [[read for read in reads if read.made_by in awaited] for reads in step.reads]
        """By position, the operands that a worker may have to wait for."""

    def run(self, order: Sequence[Instruction]) -> None:
        sends = [op.name == SEND for op in self.step.ops]
        for index, part in order:
            if sends[index]:
                self._send(index, part)
                continue
            for worker in self.step.workers[index]:
                stream, duration = self.streams[worker][index], self.seconds[worker][index]
                if stream is None:
                    self._run(index, part, worker, duration)
                else:
                    self._begin(index, part, worker, duration, stream)
        for (worker, _), end in self.asynchronous.items():
            self.exposed[worker] += max(0.0, end - self.clock[worker])
            self.clock[worker] = max(self.clock[worker], end)

    def _begin(self, index: int, part: int, worker: int, duration: float, stream: str) -> None:
        times = [self.ready.get((self.step.maker(read, part), worker), 0.0) for read in self.waited[index]]
        end = max([self.asynchronous[worker, stream], self.clock[worker], *times]) + duration
        self.asynchronous[worker, stream] = self.ready[(index, part), worker] = end
        self.clock[worker] += self.contention[worker] * duration
        self.exposed[worker] += self.contention[worker] * duration

    def _run(self, index: int, part: int, worker: int, duration: float) -> None:
        earliest = start = self.clock[worker]
        for read in self.waited[index]:
            time = self.ready.get((self.step.maker(read, part), worker), 0.0)
            start = max(start, time)
            if self.streams[worker][read.made_by] is None:
                earliest = max(earliest, time)
        self.exposed[worker] += start - earliest
        self.clock[worker] = start + duration

    def _send(self, index: int, part: int) -> None:
        source, target = ends_of(self.step.ops[index])
        half = self.seconds[source][index] / 2
        self._run(index, part, source, half)
        self.ready[(index, part), target] = self.clock[source] + half
        self.clock[target] += half
