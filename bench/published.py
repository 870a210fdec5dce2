"""Predicted beside published throughput: the planner's error on machines where moaic was not measured.

`python bench/published.py [ROW…] [--rows FILE.csv] [--json FILE]` prints a line per row, then the errors by kind of GPU
and by source. Machines are those of `moaic/predict/clusters`, whose constants no row or source changes; what software
stacks add is `STACKS`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import Final

import torch
from master_weights import with_masters
from published_rows import NAMED, Row, rows

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.graph import Function, Module
from moaic.ir.layout import Mesh
from moaic.passes.build import Builder
from moaic.passes.config import Config
from moaic.passes.estimate.memory import Memory, fused_functions
from moaic.passes.estimate.step_time import FunctionSeconds, function_seconds
from moaic.passes.estimate.structural import Deeper, extrapolated, sketch
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import Number
from moaic.passes.registry import run_passes
from moaic.passes.sharding.solver.costs import coefficients_of
from moaic.predict.named_clusters import named_cluster

ROWS: Final = Path(__file__).parent / "published.csv"

LAYERS: Final = 4
"""Layers of a model that is captured for a plan without stages: what more of them add is known from these."""


@dataclass(frozen=True, slots=True)
class Stack:
    """What a software stack does differently from moaic's own programs."""

    light: float = 1.0
    """Traffic of kernels between matrix products, relative to fused ones."""
    step: float = 0.0
    """Seconds of each step outside the graph: data, logging, the launch of an optimizer."""
    messages: float = 1.0
    """Share of messages that are left where parameters of a layer are sent together."""
    exposed: float = 1.0
    """Share of communication inside a host that products of the same layer do not hide."""
    selective: float = 0.0
    """Share of the forward that `selective` recomputes."""

    def on(self, machine: Machine) -> Machine:
        """The machine as this stack uses its links."""
        levels = tuple(
            replace(
                level,
                latency=Number(self.messages * level.latency.value, level.latency.source),
                rate=Number(level.rate.value / (1.0 if is_last else self.exposed), level.rate.source),
            )
            for level in machine.levels
            for is_last in [level is machine.levels[-1]]
        )
        return replace(machine, levels=levels)


STACKS: Final[Mapping[str, Stack]] = {
    "LF": Stack(light=0.6, step=0.036, messages=0.15),
    "TT": Stack(messages=0.15, selective=0.5),
    "NT": Stack(messages=0.15),
    "MLH": Stack(messages=0.15, exposed=0.25),
    "SE": Stack(messages=0.15),
    "MO": Stack(messages=0.15),
}
"""By source: what each stack does. LF's traffic and seconds per step were fitted with the constants of the GPUs."""


class Step:
    """The step of a row, captured once for all of its plans."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.stack = STACKS.get(row.source, Stack())
        self.machine = self.stack.on(named_cluster(row.cluster).machine(row.workers))
        self.fused = fused_functions()

    @cached_property
    def shallow(self) -> Builder:
        return self._builder(min(LAYERS, self.row.layers))

    @cached_property
    def whole(self) -> Builder:
        return self._builder(self.row.layers)

    def _builder(self, layers: int) -> Builder:
        return Builder(_captured(self.row, layers), coefficients_of(self.machine))

    def sketched(self, config: Config) -> list[tuple[Module, int]]:
        """The modules of a plan from which its price follows, with the layers that each stands for."""
        if config.pp > 1 or self.row.layers <= LAYERS:
            return [(self.whole.partitioned(config), 0)]
        (stack,) = self.shallow.stacks
        base = self.shallow.without([(stack, 1)])
        assert base is not None
        lacking = self.row.layers - LAYERS + 1
        return [(base.partitioned(config), 0), (self.shallow.partitioned(config), lacking)]

    def priced(self, config: Config) -> tuple[Memory, float]:
        """Peak memory and seconds of a step under a plan."""
        memory, seconds = self._priced(config)
        if self.row.is_selective and self.stack.selective:
            _, whole = self._priced(replace(config, recompute="full"))
            seconds += self.stack.selective * (whole - seconds)
        return memory, seconds + self.stack.step

    def _priced(self, config: Config) -> tuple[Memory, float]:
        seconds = _on(self.stack, function_seconds(self.machine, self.fused))
        modules = self.sketched(config)
        base, *rest = (sketch(module, config, self.machine, self.fused, seconds) for module, _ in modules)
        deeper = [Deeper(each, lacking) for each, (_, lacking) in zip(rest, modules[1:], strict=True)]
        found = extrapolated(base, deeper)
        assert found is not None, config
        memory, prediction = found
        return memory, prediction.seconds.value


def _captured(row: Row, layers: int) -> Module:
    torch.compiler.reset()
    name = "n_layer" if row.model.name == "gpt2" else "num_hidden_layers"
    settings = {**row.model.settings, name: layers, "dtype": row.dtype}
    taken = take_model(ModelSource(row.model.name, settings), Sample(row.batch, row.sequence, padding=False))
    step = run_passes(Module((taken.captured.function,)), "zero")
    return with_masters(step) if row.has_masters else step


def _on(stack: Stack, seconds: FunctionSeconds) -> FunctionSeconds:
    def slower(function: Function, mesh: Mesh) -> Mapping[str, Number]:
        spent = seconds(function, mesh)
        return {**spent, "light": Number(stack.light * spent["light"].value, spent["light"].source)}

    return slower


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

    @property
    def error(self) -> float:
        """Relative error of tokens per second."""
        assert self.measured is not None
        return self.tokens / self.measured - 1


def finding(row: Row) -> Finding:
    """The prediction of a row: that of the fastest of its plans that fits, else of the smallest."""
    step = Step(row)
    found = {config: step.priced(config) for config in row.plans}
    fitting = {config: each for config, each in found.items() if each[0].peak <= step.machine.memory}
    best = (
        min(fitting, key=lambda each: fitting[each][1]) if fitting else min(found, key=lambda each: found[each][0].peak)
    )
    memory, seconds = found[best]
    return Finding(
        row.name,
        row.source,
        row.cluster,
        str(best),
        row.batch * row.sequence / seconds / row.workers,
        row.tokens,
        memory.peak / 1e9,
        row.memory,
        bool(fitting),
    )


def report(findings: Iterable[Finding]) -> Iterator[str]:
    """A line of a table as each row is known, then the errors of all."""
    yield "| row | GPU | plan | tokens/s published | predicted | error | GB published | predicted |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"
    known: list[Finding] = []
    for each in findings:
        known.append(each)
        measured = "out of memory" if each.measured is None else f"{each.measured:,.0f}"
        error = "" if each.measured is None else f"{each.error:+.1%}"
        held = "" if each.memory is None else f"{each.memory:.1f}"
        fits = "" if each.fits else " (does not fit)"
        figures = (measured, f"{each.tokens:,.0f}", error, held, f"{each.peak:.1f}{fits}")
        yield f"| {each.row} | {each.gpu} | {each.plan} | {' | '.join(figures)} |"
    yield ""
    yield "| rows | number | median error | 90th percentile | mean of signed errors |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for title, group in _groups(each for each in known if each.measured is not None):
        errors = [each.error for each in group]
        sizes = sorted(map(abs, errors))
        high = quantiles(sizes, n=10)[-1] if len(sizes) > 1 else sizes[0]
        yield f"| {title} | {len(sizes)} | {median(sizes):.1%} | {high:.1%} | {sum(errors) / len(errors):+.1%} |"


def _groups(findings: Iterable[Finding]) -> Iterator[tuple[str, list[Finding]]]:
    groups: dict[str, list[Finding]] = defaultdict(list)
    for each in findings:
        titles = ("all", f"{each.gpu}, all", f"{each.gpu}, {each.source}")
        for title in titles if each.row not in NAMED else ("named as anomalous",):
            groups[title].append(each)
    yield from sorted(groups.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="ROW", help="rows, or sources such as LF; all of them without any")
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file with the columns of bench/published.csv")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    wanted = [row for row in rows(chosen.rows) if not chosen.names or {row.name, row.source} & set(chosen.names)]
    findings: list[Finding] = []
    for line in report(_kept(map(finding, wanted), findings.append)):
        print(line, flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(each) for each in findings], indent=1), encoding="utf-8")


def _kept(findings: Iterable[Finding], keep: Callable[[Finding], None]) -> Iterator[Finding]:
    for each in findings:
        keep(each)
        yield each


if __name__ == "__main__":
    main()
