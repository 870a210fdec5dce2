"""Schedules measured beside their simulation: the error of the planner's clock.

The time of functions varies with the load of the machine. So the simulation uses the average time of each function in a
trace of the same run: the comparison is about order, waiting and overlap.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from moaic.ir.graph import Module, Op, Value
from moaic.ir.layout import Mesh
from moaic.ir.op_names import SEND
from moaic.ir.parser import parse
from moaic.passes.estimate.simulate import simulate
from moaic.runtime.protocol.span import TraceSpan, decoded

Step = Mapping[int, Sequence[TraceSpan]]
"""What each worker did of one program, once."""


def beside(program: Path, trace: Path) -> tuple[float, float]:
    """Seconds of a program as they are simulated and as they were measured, in the middle of the traced steps."""
    module, steps = parse(program.read_text(encoding="utf-8")), _steps(trace)
    run = simulate(module, _durations(module, steps))
    return run.ends[run.last], median(map(_length, steps))


def _steps(trace: Path) -> list[Step]:
    steps = json.loads(trace.read_text(encoding="utf-8"))
    return [
        {int(rank): [span for span in decoded(spans) if span.kind != "command"] for rank, spans in step.items()}
        for step in steps
    ]


def _length(step: Step) -> float:
    spans = [span for spans in step.values() for span in spans]
    return (max(span.end for span in spans) - min(span.begin for span in spans)) / 1e9


def _durations(module: Module, steps: Sequence[Step]) -> dict[Op, float]:
    """Seconds of each instruction: of a function the mean, else the shortest of its kind, as the others waited."""
    taken: dict[tuple[int, str], list[float]] = defaultdict(list)
    for rank, spans in (item for step in steps for item in step.items()):
        for span in spans:
            taken[rank, span.name].append((span.end - span.begin) / 1e9)

    def seconds(op: Op) -> float:
        if op.name == "call":
            return max(mean(taken[rank, op.callee]) for rank in _doers(op.results[0], module.mesh))
        if op.name == SEND:
            # Its other half is the receiver's, who waits besides.
            return 2 * min(min(taken[rank, op.name]) for rank in _doers(next(op.inputs()), module.mesh))
        # What nobody asked for is not done.
        return min(min(taken[rank, op.name], default=0.0) for rank in _doers(op.results[0], module.mesh))

    return {op: seconds(op) for op in module.main.ops}


def _doers(value: Value, mesh: Mesh) -> list[int]:
    """Ranks that hold a value."""
    return [rank for rank in range(mesh.ranks) if value.type.layout.holds(mesh.coordinates(rank))]
