"""The parameter guide: what a model's training step is predicted to take on machines of different sizes.

The step is captured without weights, and planned as it would be for a run. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from moaic.capture.trace_only import ModelSource, Sample, take_model
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.config import Request
from moaic.passes.perf.machine import Machine, Number
from moaic.passes.perf.structural_hash import key_of
from moaic.passes.registry import run_passes
from moaic.planner.search import Selection, search
from moaic.planner.worker import CompilerPool
from moaic.predict.kernel_cache import MadeKernels
from moaic.predict.kernel_report import called_in
from moaic.runtime.host.flavors import Host
from moaic.runtime.host.folders import write_whole
from moaic.text.tables import markdown_head, markdown_row
from moaic.text.units import duration, gib

HEAD = ("flavor", "workers", "batch", "plan", "step", "tokens/s", "needed per worker")

WORKERS = (1, 2, 4, 8)
"""Sizes that are looked at where nobody says which."""

LITTLE = 0.01
"""Seconds, of which no whole number of milliseconds says enough."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the guide is to say something about: each batch on each number of workers like those of `machine`.

    Only plans that keep to `request` count.
    """

    source: ModelSource
    batches: Sequence[int]
    sequence: int
    machine: Machine
    workers: Sequence[int]
    request: Request
    padding: bool = True
    kernels: MadeKernels | None = None
    """Given where the kernels of plans are to be made, so that these are chosen and priced by them."""
    folder: Path | None = None
    """Where selected plans are to be written, as `batch-8-on-4.moai`."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The selected plan of one batch on so many workers; `reason` says why there is none."""

    workers: int
    batch: int
    plan: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    """Peak of the fullest worker."""
    reason: str = ""
    parts: Mapping[str, Number] = field(default_factory=dict[str, Number])
    """What the seconds go into."""
    functions: int = 0
    """Of the plan's program, and of how many of them the kernels are known."""
    known: int = 0


def answers(question: Question, pool: CompilerPool) -> Iterator[Estimate]:
    """One answer per batch and number of workers, as soon as it is known. Raises Diagnostic for no model."""
    for batch in question.batches:
        step = captured_step(question.source, Sample(batch, question.sequence, padding=question.padding))
        for workers in question.workers:
            machine = replace(question.machine, workers=workers)
            yield planned(step, batch, machine, question, pool)


def captured_step(source: ModelSource, sample: Sample) -> Module:
    """The training step of a loop that reads the loss and nothing else."""
    # Dynamo counts over all models of a type how often one forward is captured, and gives up after eight.
    torch.compiler.reset()
    captured = take_model(source, sample).captured
    return run_passes(Module((captured.function,)), "zero")


def planned(step: Module, batch: int, machine: Machine, question: Question, pool: CompilerPool) -> Estimate:
    """What is to be said of one step on one machine."""
    try:
        selection = _selected(step, machine, question, pool)
    except Diagnostic as error:
        return Estimate(machine.workers, batch, reason=error.message)
    if question.folder is not None:
        _write(question.folder / f"batch-{batch}-on-{machine.workers}.moai", selection.plan.module)
    chosen = selection.search_result.of(selection.search_result.selected)
    assert chosen.prediction is not None
    assert chosen.memory is not None
    keys = [key_of(function) for function, _ in called_in(selection.plan.programs.joint)]
    return Estimate(
        machine.workers,
        batch,
        str(chosen.config),
        chosen.prediction.seconds.value,
        chosen.memory.peak,
        parts=chosen.prediction.parts,
        functions=len(keys),
        known=sum(key in selection.machine.made for key in keys),
    )


def _selected(step: Module, machine: Machine, question: Question, pool: CompilerPool) -> Selection:
    """The best plan; where kernels are to be made, those of each that comes out best, until one stays the best."""
    if question.kernels is None:
        return search(step, machine, question.request, pool=pool)
    while True:
        known = replace(machine, made=question.kernels.known)
        selection = search(step, known, question.request, pool=pool)
        if not question.kernels.make(selection.plan.programs.joint):
            return selection


def _write(path: Path, plan: Module) -> None:
    try:
        write_whole(path, render(plan))
    except OSError as error:
        raise Diagnostic(f"cannot write {path}: {error.strerror or error}") from None


def row(answer: Estimate, question: Question) -> str:
    """One line of a Markdown table with the columns of `HEAD`."""
    flavor = Host(answer.workers, answer.workers * question.machine.memory).flavor(answer.workers)
    known = (flavor.name, str(answer.workers), str(answer.batch))
    if answer.reason:
        return markdown_row((*known, answer.reason, "", "", ""))
    rate = f"{answer.batch * question.sequence / answer.seconds:,.0f}"
    return markdown_row((*known, f"`{answer.plan}`", _time(answer.seconds), rate, gib(answer.nbytes)))


def sources(answer: Estimate) -> str:
    """A line of a Markdown list: what the predicted seconds go into, and where each number comes from."""
    parts = ", ".join(f"{part} {duration(each.value)} ({each.source})" for part, each in answer.parts.items())
    return (
        f"* batch {answer.batch} on {answer.workers}: {parts}; "
        f"kernels were made of {answer.known} of {answer.functions} functions"
    )


def head() -> str:
    """The first two lines of the table."""
    return markdown_head(HEAD)


def _time(seconds: float) -> str:
    if seconds < LITTLE:
        return duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
