"""Compiling candidates, here or in a process of the planner's pool: `python -m moaic.planner.worker`.

A pool process reads one JSON object per line and answers each with one: text in, text out. It ends when its input does,
also in the middle of a candidate, and when its work is long done.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, TextIO

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.overlap_schedule import overlap_schedule
from moaic.ir.parser import parse
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.estimate.memory import Memory, fused_functions, memory_of
from moaic.passes.estimate.step_time import Prediction, function_seconds, predict
from moaic.passes.lowering.plan import Plan
from moaic.passes.perf import machine as machines
from moaic.passes.perf.machine import Machine, MeasureSource, Number
from moaic.passes.sharding.solver.costs import coefficients_of

REST_SECONDS = 10.0
"""A process that has compiled something ends when nobody has wanted more of it for this long."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a candidate: its memory, or the reason why it is no plan."""

    memory: Memory | None = None
    dropped: str = ""
    crash: str = ""
    """Trace of a failure that is a bug of ours, not a property of the candidate."""


class CompilerPool(Protocol):
    """Compiles candidates of one step for one machine, in whatever order, and answers in the order asked."""

    def begin(self, step: Module, machine: Machine) -> None:
        """What follows is about `step`."""
        ...

    def compile(self, configs: Sequence[Config]) -> list[Compiled]: ...

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        """Predictions for candidates that were compiled."""
        ...


class Here:
    """A pool of no processes: everything happens in this one."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None

    def begin(self, step: Module, machine: Machine) -> None:
        self._compiler = Compiler(step, machine)

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        return [self._ready.compile(config) for config in configs]

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        return [self._ready.cost(config) for config in configs]

    @property
    def _ready(self) -> Compiler:
        assert self._compiler is not None, "a pool is asked before it was told of a step"
        return self._compiler


class Compiler:
    """Compiles candidates of one step, and keeps those that fit until their cost is asked for."""

    def __init__(self, step: Module, machine: Machine) -> None:
        self._builder = Builder(step, coefficients_of(machine))
        self._machine = machine
        self._fused = fused_functions()
        self._seconds = function_seconds(machine, self._fused)
        self._plans: dict[Config, Plan] = {}

    def compile(self, config: Config) -> Compiled:
        try:
            plan = self._build(config)
            memory = memory_of(plan, self._fused)
        except Diagnostic as error:
            return Compiled(dropped=error.message)
        except Exception:
            # One exotic candidate must not take training down; whoever asked says loudly that this is a bug.
            return Compiled(crash=traceback.format_exc())
        if memory.peak <= self._machine.memory:
            self._plans[config] = plan
        return Compiled(memory)

    def cost(self, config: Config) -> Prediction:
        """The prediction for a candidate that compiled; built again where it was not kept."""
        plan = self._plans.get(config) or self._build(config)
        return predict(plan, self._machine, self._seconds)

    def _build(self, config: Config) -> Plan:
        """The plan, its instructions in the order in which this machine's workers do them."""
        plan = self._builder.build(config)
        if not self._machine.overlaps:
            return plan
        return replace(plan, programs=replace(plan.programs, joint=overlap_schedule(plan.programs.joint)))


def serve(requests: queue.SimpleQueue[str], answers: TextIO) -> None:
    """Answers requests until there has been none for a while after the first."""
    compiler: Compiler | None = None
    while line := _next(requests, None if compiler is None else REST_SECONDS):
        request = json.loads(line)
        if "step" in request:
            compiler = Compiler(parse(request["step"]), machines.from_text(request["machine"]))
            answer: dict[str, Any] = {}
        elif "compile" in request:
            assert compiler is not None
            answer = compiled_out(compiler.compile(config_in(request["compile"])))
        else:
            assert compiler is not None
            answer = prediction_out(compiler.cost(config_in(request["cost"])))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _next(requests: queue.SimpleQueue[str], seconds: float | None) -> str:
    """The next line; nothing if it does not come in time."""
    try:
        return requests.get(timeout=seconds)
    except queue.Empty:
        return ""


def config_out(config: Config) -> dict[str, Any]:
    return asdict(config)


def config_in(data: Mapping[str, Any]) -> Config:
    return Config(**data)


def compiled_out(compiled: Compiled) -> dict[str, Any]:
    return asdict(compiled)


def compiled_in(data: Mapping[str, Any]) -> Compiled:
    memory = None if data["memory"] is None else Memory(**data["memory"])
    return Compiled(memory, data["dropped"], data["crash"])


def prediction_out(prediction: Prediction) -> dict[str, Any]:
    return {part: [number.value, str(number.source)] for part, number in prediction.parts.items()}


def prediction_in(data: Mapping[str, Any]) -> Prediction:
    return Prediction({part: Number(value, MeasureSource[source.upper()]) for part, (value, source) in data.items()})


def main() -> None:
    # What a pass makes has no cycles worth looking for in a process that ends before long.
    gc.disable()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Whatever a pass prints goes to the error stream: the answers have theirs alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    # The solver's library takes a while to load, and for now there is nothing to do.
    importlib.import_module("scipy.optimize")
    serve(requests, answers)
    # The thread that reads still holds the input, which an orderly end would wait for.
    os._exit(0)


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    # Whoever started us is gone, or wants no more: what is being compiled is for nobody.
    os._exit(0)


if __name__ == "__main__":
    main()
