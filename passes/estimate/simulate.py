"""Simulate a program instruction by instruction; each worker of a pipeline has its own clock.

A worker runs its instructions in order, each when its operands exist. A send occupies either end for half of its time,
one after the other; the receiver waits for the value alone. Asynchronous instructions of one stream have a clock of
their own, each no earlier than the instructions before it; they slow down what runs beside them, which counts when they
begin.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from moaic.ir.graph import Module, Op, Value
from moaic.ir.op_names import SEND
from moaic.passes.estimate.per_rank import ends_of


@dataclass(frozen=True, slots=True)
class Simulated:
    """By worker, its instructions, its busy seconds and the time at which it ended; `last` ended last.

    `done` and `busy` leave asynchronous instructions out; `exposed` are the seconds that the worker waited for these,
    or lost to them.
    """

    done: Mapping[int, list[Op]]
    busy: Mapping[int, float]
    ends: Mapping[int, float]
    exposed: Mapping[int, float]

    @property
    def last(self) -> int:
        return max(self.ends, key=lambda worker: self.ends[worker])


def simulate(
    program: Module, seconds: Mapping[Op, float], streams: Mapping[Op, str] | None = None, contention: float = 0.0
) -> Simulated:
    """The program with these durations on the workers along `pp`; ops that have a stream are asynchronous.

    `contention` are the seconds that each second of these costs the worker.
    """
    workers = range(program.mesh.size("pp"))
    clocks, streams = _Clocks(workers, contention), streams or {}
    for op in program.main.ops:
        if op.name == SEND:
            clocks.send(op, seconds[op])
            continue
        owner = op.results[0].type.layout.owner_on("pp")
        for worker in workers if owner is None else [owner]:
            if op in streams:
                clocks.begin(op, worker, seconds[op], streams[op])
            else:
                clocks.run(op, worker, seconds[op])
    return clocks.ended()


class _Clocks:
    """The time of every worker, and of every value on every worker."""

    def __init__(self, workers: range, contention: float) -> None:
        self.contention = contention
        self.clock = dict.fromkeys(workers, 0.0)
        self.busy = dict.fromkeys(workers, 0.0)
        self.asynchronous: dict[tuple[int, str], float] = defaultdict(float)
        """The clocks of a worker's asynchronous instructions, by stream."""
        self.exposed = dict.fromkeys(workers, 0.0)
        self.done: dict[int, list[Op]] = {worker: [] for worker in workers}
        # A value without an owner is computed by every worker, so it has a time per worker.
        self.ready: dict[tuple[Value, int], float] = defaultdict(float)
        self.made_asynchronously: set[tuple[Value, int]] = set()

    def begin(self, op: Op, worker: int, duration: float, stream: str) -> None:
        """Run an asynchronous instruction, no earlier than what the worker has run so far."""
        operands = (self.ready[value, worker] for value in op.inputs())
        end = max([self.asynchronous[worker, stream], self.clock[worker], *operands]) + duration
        self.asynchronous[worker, stream] = end
        self.clock[worker] += self.contention * duration
        self.exposed[worker] += self.contention * duration
        self.ready.update(((result, worker), end) for result in op.results)
        self.made_asynchronously.update((result, worker) for result in op.results)

    def run(self, op: Op, worker: int, duration: float) -> None:
        """Run an instruction; a wait for an asynchronous operand counts as exposed."""
        operands = [(value, worker) for value in op.inputs()]
        synchronous = (self.ready[key] for key in operands if key not in self.made_asynchronously)
        earliest = max([self.clock[worker], *synchronous])
        start = max([earliest, *(self.ready[key] for key in operands)])
        self.exposed[worker] += start - earliest
        self.clock[worker] = start + duration
        self.busy[worker] += duration
        self.done[worker].append(op)
        self.ready.update(((result, worker), self.clock[worker]) for result in op.results)

    def send(self, op: Op, duration: float) -> None:
        """Run a send: half of its time at either end, one after the other."""
        source, target = ends_of(op)
        self.run(op, source, duration / 2)
        self.ready[op.results[0], target] = self.clock[source] + duration / 2
        self.clock[target] += duration / 2
        self.busy[target] += duration / 2
        self.done[target].append(op)

    def ended(self) -> Simulated:
        """The simulation, once every worker has waited for its asynchronous instructions."""
        for (worker, _), end in self.asynchronous.items():
            self.exposed[worker] += max(0.0, end - self.clock[worker])
            self.clock[worker] = max(self.clock[worker], end)
        return Simulated(self.done, self.busy, self.clock, self.exposed)
