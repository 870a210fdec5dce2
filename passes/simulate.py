"""Run a program through in time, instruction by instruction: each worker of a pipeline has a clock of its own.

A worker does its instructions in order, each once its operands are there. A send keeps its two ends busy for half of
its time each, and neither waits for the other but for the value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from moaic.ir.graph import Module, Op, Value
from moaic.ir.ops import SEND


@dataclass(frozen=True, slots=True)
class Run:
    """What each worker did, for how long, and when it was done; `last` is the one that ended last."""

    done: Mapping[int, list[Op]]
    busy: Mapping[int, float]
    ends: Mapping[int, float]

    @property
    def last(self) -> int:
        return max(self.ends, key=lambda worker: self.ends[worker])


def simulate(program: Module, seconds: Mapping[Op, float]) -> Run:
    """The program with these durations on the workers along `pp`."""
    workers = range(program.mesh.size("pp"))
    clock = dict.fromkeys(workers, 0.0)
    busy = dict.fromkeys(workers, 0.0)
    done: dict[int, list[Op]] = {worker: [] for worker in workers}
    # What has no home is made by every worker for itself, so each has a time of its own for it.
    ready: dict[tuple[Value, int], float] = defaultdict(float)

    def run(op: Op, worker: int, duration: float) -> None:
        start = max([clock[worker], *(ready[value, worker] for value in op.inputs())])
        clock[worker] = start + duration
        busy[worker] += duration
        done[worker].append(op)
        ready.update(((result, worker), clock[worker]) for result in op.results)

    for op in program.main.ops:
        if op.name == SEND:
            source, target = (value.type.layout.home_on("pp") for value in (*op.inputs(), *op.results))
            assert source is not None
            assert target is not None
            run(op, source, seconds[op] / 2)
            ready[op.results[0], target] = clock[source]
            clock[target] += seconds[op] / 2
            busy[target] += seconds[op] / 2
            done[target].append(op)
            continue
        home = op.results[0].type.layout.home_on("pp")
        for worker in workers if home is None else [home]:
            run(op, worker, seconds[op])
    return Run(done, busy, clock)
