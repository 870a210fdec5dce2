"""The prices of a published row's plans, and how much of its time each constant of the GPU decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from master_weights import with_masters
from published_rows import Row, Skipped
from published_stacks import STACKS, USUAL, on_stack

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.estimate.memory import fused_functions
from moaic.passes.estimate.step_time import Rates, function_seconds
from moaic.passes.estimate.structural import Deeper, extrapolated, sketch
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import Number
from moaic.passes.registry import run_passes
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.planner.pricer import Pricer

LAYERS: Final = 4
"""Layers of a model that is captured for a plan without stages: what more of them add is known from these."""


def _slower(*families: str) -> Callable[[Machine, float], Machine]:
    def of(machine: Machine, factor: float) -> Machine:
        rates = {
            name: Number(rate.value / factor, rate.source) if name.partition(".")[0] in families else rate
            for name, rate in machine.flops.items()
        }
        return replace(machine, flops=rates)

    return of


def _less_bandwidth(machine: Machine, factor: float) -> Machine:
    return replace(machine, bandwidth=Number(machine.bandwidth.value / factor, machine.bandwidth.source))


CONSTANTS: Final[Mapping[str, Callable[[Machine, float], Machine]]] = {
    "matmul": _slower("mm"),
    "attention": _slower("sdpa", "sdpa_backward"),
    "bandwidth": _less_bandwidth,
    "contention": lambda machine, factor: replace(machine, contention=machine.contention * factor),
}
"""What is fitted for each kind of GPU, and the machine on which it costs so many times as much."""

GROWN: Final = 1.1
"""What a constant is multiplied by to see what it decides."""


@dataclass(frozen=True, slots=True)
class Price:
    """Peak bytes of a worker, and seconds of a step."""

    nbytes: float
    seconds: float

    def towards(self, other: Price, share: float) -> Price:
        """This price with that share of the difference to another."""
        nbytes, seconds = other.nbytes - self.nbytes, other.seconds - self.seconds
        return Price(self.nbytes + share * nbytes, self.seconds + share * seconds)


class Step:
    """The step of a row, captured once for all of its plans."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.stack = STACKS.get(row.source, USUAL)
        self.machine = self.stack.on(row.cluster.machine(row.workers))
        self.fused = fused_functions()
        self._modules: dict[Config, list[tuple[Module, int]]] = {}

    @cached_property
    def shallow(self) -> Builder:
        return Builder(_captured(self.row, min(LAYERS, self.row.layers)), coefficients_of(self.machine))

    @cached_property
    def whole(self) -> Pricer:
        return Pricer(_captured(self.row, self.row.layers), self.machine)

    def fits(self, price: Price) -> bool:
        return price.nbytes <= self.machine.memory

    def priced(self, config: Config) -> Price:
        return self._priced(config, self.machine)

    def shares(self, config: Config) -> Mapping[str, float]:
        """By constant, the share of the step's time that grows with what it costs."""
        seconds = self.priced(config).seconds
        grown = {name: self._priced(config, slower(self.machine, GROWN)).seconds for name, slower in CONSTANTS.items()}
        return {name: (each / seconds - 1) / (GROWN - 1) for name, each in grown.items()}

    def _priced(self, config: Config, machine: Machine) -> Price:
        price = self._extrapolated(config, machine)
        if self.row.is_selective and self.stack.selective:
            whole = self._extrapolated(replace(config, recompute="full"), machine)
            price = price.towards(whole, self.stack.selective)
        return replace(price, seconds=price.seconds + self.stack.step)

    def _extrapolated(self, config: Config, machine: Machine) -> Price:
        rates = [Rates(machine, on_stack(self.stack, function_seconds(machine, self.fused)))] * config.pp
        modules = self.sketched(config)
        base, *rest = (sketch(module, config, rates, [machine.memory] * config.pp, self.fused) for module, _ in modules)
        deeper = [Deeper(each, lacking) for each, (_, lacking) in zip(rest, modules[1:], strict=True)]
        found = extrapolated(base, deeper)
        if found is None:
            raise Diagnostic(f"{config} has too little in common with the same plan of fewer layers")
        memory, prediction = found
        return Price(self.stack.nbytes(memory, config), prediction.seconds.value)

    def sketched(self, config: Config) -> Sequence[tuple[Module, int]]:
        """The modules of a plan from which its price follows, with the layers that each stands for; kept."""
        if config not in self._modules:
            self._modules[config] = self._sketched(config)
        return self._modules[config]

    def _sketched(self, config: Config) -> list[tuple[Module, int]]:
        if config.pp > 1:
            return self.whole.staged(config)
        if self.row.layers <= LAYERS:
            return [(self.shallow.partitioned(config), 0)]
        (stack,) = self.shallow.stacks
        base = self.shallow.without([(stack, 1)])
        assert base is not None
        lacking = self.row.layers - LAYERS + 1
        return [(base.partitioned(config), 0), (self.shallow.partitioned(config), lacking)]


def _captured(row: Row, layers: int) -> Module:
    torch.compiler.reset()
    name = "n_layer" if row.model.name == "gpt2" else "num_hidden_layers"
    settings = {**row.model.settings, name: layers, "dtype": row.dtype}
    taken = take_model(ModelSource(row.model.name, settings), Sample(row.batch, row.sequence, padding=False))
    step = run_passes(Module((taken.captured.function,)), "zero")
    return with_masters(step) if row.has_masters else step


@dataclass(frozen=True, slots=True)
class Finding:
    """What was predicted for a row: its plan, tokens per second and worker, and bytes; whether it fits."""

    row: str
    source: str
    gpu: str
    plan: str
    tokens: float
    measured: float | None
    peak: float
    """GB."""
    memory: float | None
    fits: bool
    flops: float
    """FLOPs of the model per token, to compare rows of one source by."""
    shares: Mapping[str, float]
    """By constant of the GPU, the share of the step's time that it decides."""
    note: str = ""
    """What is simulated otherwise than the row says."""

    @property
    def error(self) -> float:
        """Relative error of tokens per second."""
        assert self.measured is not None
        return self.tokens / self.measured - 1


def finding(row: Row) -> Finding | Skipped:
    """The prediction of a row: that of the fastest of its plans that fits, else of the smallest."""
    try:
        return _finding(row)
    except Diagnostic as error:
        return Skipped(row.name, error.message)
    except Exception as error:  # of PyTorch or transformers, for sizes that they refuse: the other rows go on
        return Skipped(row.name, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def _finding(row: Row) -> Finding:
    step = Step(row)
    found = _prices(step)
    fitting = {config: each for config, each in found.items() if step.fits(each)}
    best = (
        min(fitting, key=lambda each: fitting[each].seconds)
        if fitting
        else min(found, key=lambda each: found[each].nbytes)
    )
    price = found[best]
    return Finding(
        row.name,
        row.source,
        row.gpu,
        str(best),
        row.batch * row.sequence / price.seconds / row.workers,
        row.tokens,
        price.nbytes / 1e9,
        row.memory,
        bool(fitting),
        row.flops,
        step.shares(best),
        row.note,
    )


def _prices(step: Step) -> Mapping[Config, Price]:
    """The prices of the plans that there are. Raises Diagnostic where there is none."""
    found: dict[Config, Price] = {}
    reasons: list[Diagnostic] = []
    for config in step.row.plans:
        # Where memory suffices, to recompute only takes time.
        if (saving := found.get(replace(config, recompute="saved"))) is not None and step.fits(saving):
            continue
        try:
            found[config] = step.priced(config)
        except Diagnostic as error:
            reasons.append(error)
    if not found:
        raise reasons[0]
    return found
