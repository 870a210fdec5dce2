"""Compilation of candidates, in this process or in one of the planner's pool: `python -m moaic.planner.worker`.

A pool process reads one JSON object per line and answers each with another. It ends when its input is closed, also in
the middle of a candidate, and when it is idle for REST_SECONDS after its first request.
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
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.parser import parse
from moaic.passes.config import Config
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.stages import StageBound
from moaic.passes.estimate.step_time import Prediction
from moaic.passes.perf import machine_text
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.planner import log
from moaic.planner.pricer import Pricer

REST_SECONDS = 10.0
"""Seconds without a request after which a process that has compiled something ends."""

LAST = 19
"""The lowest priority of a thread."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of compiling a candidate: its memory, or the reason why it is not possible."""

    memory: Memory | None = None
    dropped: str = ""
    crash: str = ""
    """Trace of an exception that is a bug of moaic, not a property of the candidate."""


class CompilerPool(Protocol):
    """Compiles candidates of one step for one machine; returns results in the order of the arguments."""

    def begin(self, step: Module, machine: Machine) -> None:
        """Sets step and machine of the following requests."""
        ...

    def compile(self, configs: Sequence[Config]) -> list[Compiled]: ...

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        """Predictions for candidates that were compiled."""
        ...

    def stage_bounds(self, configs: Sequence[Config]) -> list[StageBound]:
        """What pipelines of deep steps take at least, far sooner than they are compiled; nothing for other steps."""
        ...


class InProcessPool:
    """A compiler pool without processes of its own: compiles in this process."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None

    def begin(self, step: Module, machine: Machine) -> None:
        self._compiler = Compiler(step, machine)

    def compile(self, configs: Sequence[Config]) -> list[Compiled]:
        return [self._ready.compile(config) for config in configs]

    def cost(self, configs: Sequence[Config]) -> list[Prediction]:
        return [self._ready.cost(config) for config in configs]

    def stage_bounds(self, configs: Sequence[Config]) -> list[StageBound]:
        try:
            return [self._ready.stage_bound(config) for config in configs]
        except Exception:
            # As with a candidate that crashes: training goes on.
            log.unbounded(traceback.format_exc())
            return [StageBound() for _ in configs]

    @property
    def _ready(self) -> Compiler:
        assert self._compiler is not None, "a pool is used before its `begin`"
        return self._compiler


class Compiler:
    """Prices candidates of one step, and keeps the predictions until they are asked for."""

    def __init__(self, step: Module, machine: Machine) -> None:
        self._pricer = Pricer(step, machine)
        self._predictions: dict[Config, Prediction] = {}

    def compile(self, config: Config) -> Compiled:
        try:
            memory, self._predictions[config] = self._pricer.price(config)
        except Diagnostic as error:
            return Compiled(dropped=error.message)
        except Exception:
            # One candidate that crashes must not end training; the search logs it as a bug.
            return Compiled(crash=traceback.format_exc())
        return Compiled(memory)

    def cost(self, config: Config) -> Prediction:
        """The prediction for a candidate that compiled; priced again where this process has not done it."""
        if config not in self._predictions:
            self._predictions[config] = self._pricer.price(config)[1]
        return self._predictions[config]

    def stage_bound(self, config: Config) -> StageBound:
        """A bound on what the pipeline `config` takes."""
        return self._pricer.stage_bound(config)


def serve(requests: queue.SimpleQueue[str], answers: TextIO) -> None:
    """Answers requests until there is none for REST_SECONDS after the first."""
    compiler: Compiler | None = None
    while line := _next(requests, None if compiler is None else REST_SECONDS):
        request = json.loads(line)
        if "step" in request:
            compiler = Compiler(parse(request["step"]), machine_text.from_text(request["machine"]))
            answer: dict[str, Any] = {}
        elif "compile" in request:
            assert compiler is not None
            answer = compiled_out(compiler.compile(config_in(request["compile"])))
        elif "stages" in request:
            assert compiler is not None
            answer = asdict(compiler.stage_bound(config_in(request["stages"])))
        else:
            assert compiler is not None
            answer = prediction_out(compiler.cost(config_in(request["cost"])))
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _next(requests: queue.SimpleQueue[str], seconds: float | None) -> str:
    """The next line; empty if it does not come within `seconds`."""
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
    parts = {part: [number.value, str(number.source)] for part, number in prediction.parts.items()}
    return {"parts": parts, "compiling": prediction.compiling, "over_dp": prediction.over_dp}


def prediction_in(data: Mapping[str, Any]) -> Prediction:
    parts = {part: Number(value, MeasureSource[source.upper()]) for part, (value, source) in data["parts"].items()}
    return Prediction(parts, data["compiling"], data["over_dp"])


def main() -> None:
    # Passes create few reference cycles, and the process ends soon: garbage collection costs more than it frees.
    gc.disable()
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    # Output of a pass goes to standard error, so that the pipe of standard output carries answers alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    threading.Thread(target=_load_solver, daemon=True).start()
    serve(requests, answers)
    # The reading thread blocks on standard input; a regular exit would wait for it.
    os._exit(0)


def _load_solver() -> None:
    """Load the solver's library before it is needed, behind all who start up: a plan from the cache needs none."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LAST)
    importlib.import_module("scipy.optimize")


def _read(requests: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    # The controller has ended or closed the pool, so the result is not needed any more.
    os._exit(0)


if __name__ == "__main__":
    main()
