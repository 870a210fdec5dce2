"""Simulate a program instruction by instruction; each worker of a pipeline has its own clock.

A worker runs its instructions in order, each when its operands exist. A send occupies either end for half of its time;
the receiver waits for the value alone. Asynchronous instructions run one after the other on a second clock, each no
earlier than the instructions before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

from moaic.ir.graph import Module, Op, Value
from moaic.ir.ops import SEND


@dataclass(frozen=True, slots=True)
class Simulated:
    """By worker, its instructions, its busy seconds and the time at which it ended; `last` ended last.

    `done` and `busy` leave asynchronous instructions out; `exposed` are the seconds that the worker waited for these.
    """

    done: Mapping[int, list[Op]]
    busy: Mapping[int, float]
    ends: Mapping[int, float]
    exposed: Mapping[int, float]

    @property
    def last(self) -> int:
        return max(self.ends, key=lambda worker: self.ends[worker])


def simulate(program: Module, seconds: Mapping[Op, float], beside: Set[Op] = frozenset()) -> Simulated:
    """The program with these durations on the workers along `pp`; ops in `beside` are asynchronous."""
    workers = range(program.mesh.size("pp"))
    clock = dict.fromkeys(workers, 0.0)
    busy = dict.fromkeys(workers, 0.0)
    side = dict.fromkeys(workers, 0.0)
    exposed = dict.fromkeys(workers, 0.0)
    done: dict[int, list[Op]] = {worker: [] for worker in workers}
    # A value without an owner is computed by every worker, so it has a time per worker.
    ready: dict[tuple[Value, int], float] = defaultdict(float)
    under_way: set[tuple[Value, int]] = set()

    def begin(op: Op, worker: int, duration: float) -> None:
        side[worker] = max([side[worker], clock[worker], *(ready[value, worker] for value in op.inputs())]) + duration
        ready.update(((result, worker), side[worker]) for result in op.results)
        under_way.update((result, worker) for result in op.results)

    def run(op: Op, worker: int, duration: float) -> None:
        wanted = [(value, worker) for value in op.inputs()]
        earliest = max([clock[worker], *(ready[key] for key in wanted if key not in under_way)])
        start = max([earliest, *(ready[key] for key in wanted)])
        exposed[worker] += start - earliest
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
        owner = op.results[0].type.layout.owner_on("pp")
        for worker in workers if owner is None else [owner]:
            (begin if op in beside else run)(op, worker, seconds[op])
    for worker in workers:
        exposed[worker] += max(0.0, side[worker] - clock[worker])
        clock[worker] = max(clock[worker], side[worker])
    return Simulated(done, busy, clock, exposed)
