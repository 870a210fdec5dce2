"""Run a program through in time, instruction by instruction: each worker of a pipeline has a clock of its own.

A worker does its instructions in order, each once its operands are there. A send keeps its two ends busy for half of
its time each, and neither waits for the other but for the value. Some instructions may run beside the others: one after
the other on a clock of their own, each after what the worker was told before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from moaic.ir.graph import Module, Op, Value
from moaic.ir.op_names import SEND


@dataclass(frozen=True, slots=True)
class Simulated:
    """What each worker did, for how long, and when it was done; `last` is the one that ended last.

    `done` and `busy` leave out what ran beside; `exposed` is how long the worker waited for that.
    """

    done: Mapping[int, list[Op]]
    busy: Mapping[int, float]
    ends: Mapping[int, float]
    exposed: Mapping[int, float]

    @property
    def last(self) -> int:
        return max(self.ends, key=lambda worker: self.ends[worker])


def simulate(program: Module, seconds: Mapping[Op, float], beside: Set[Op] = frozenset()) -> Simulated:
    """The program with these durations on the workers along `pp`; what is `beside` runs beside the rest."""
    workers = range(program.mesh.size("pp"))
    clock = dict.fromkeys(workers, 0.0)
    busy = dict.fromkeys(workers, 0.0)
    side = dict.fromkeys(workers, 0.0)
    exposed = dict.fromkeys(workers, 0.0)
    done: dict[int, list[Op]] = {worker: [] for worker in workers}
    # What has no home is made by every worker for itself, so each has a time of its own for it.
    ready: dict[tuple[Value, int], float] = defaultdict(float)
    under_way: set[tuple[Value, int]] = set()

    def begin(op: Op, worker: int, duration: float) -> None:
        side[worker] = max([side[worker], clock[worker], *(ready[value, worker] for value in op.inputs())]) + duration
        ready.update(((result, worker), side[worker]) for result in op.results)
        under_way.update((result, worker) for result in op.results)

    def run(op: Op, worker: int, duration: float) -> None:
        wanted = [(value, worker) for value in op.inputs()]
        there = max([clock[worker], *(ready[each] for each in wanted if each not in under_way)])
        start = max([there, *(ready[each] for each in wanted)])
        exposed[worker] += start - there
        clock[worker] = start + duration
        busy[worker] += duration
        done[worker].append(op)
        ready.update(((result, worker), clock[worker]) for result in op.results)

    for op in program.main.ops:
        if op.name == SEND:
            source, target = (value.type.layout.owner_on("pp") for value in (*op.inputs(), *op.results))
            assert source is not None
            assert target is not None
            run(op, source, seconds[op] / 2)
            ready[op.results[0], target] = clock[source]
            clock[target] += seconds[op] / 2
            busy[target] += seconds[op] / 2
            done[target].append(op)
            continue
        home = op.results[0].type.layout.owner_on("pp")
        for worker in workers if home is None else [home]:
            (begin if op in beside else run)(op, worker, seconds[op])
    for worker in workers:
        exposed[worker] += max(0.0, side[worker] - clock[worker])
        clock[worker] = max(clock[worker], side[worker])
    return Simulated(done, busy, clock, exposed)
