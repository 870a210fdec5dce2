"""The parameter guide: predicted plan, time and memory of a model's training step on machines of several sizes.

The step is captured without weights and planned as for a run. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moaic.capture.trace_only import ModelSource, Sample
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.ir.types import FLOATING
from moaic.passes.config import Request
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.numbers import Number
from moaic.passes.perf.structural_hash import key_of
from moaic.planner.search import NoPlanFits, Selection, search
from moaic.planner.worker import CompilerPool
from moaic.predict.captured_step import captured_step
from moaic.predict.kernel_cache import MadeKernels
from moaic.predict.kernel_report import called_in
from moaic.runtime.host.flavors import Host
from moaic.support.output import write_output
from moaic.text.tables import markdown_head, markdown_row
from moaic.text.units import duration, gib

HEAD = ("flavor", "workers", "batch", "plan", "step", "{unit}/s", "needed per worker")

WORKERS = (1, 2, 4, 8)
"""Numbers of workers if the user names none."""

DOUBLED = 6
"""How often the workers are doubled to find out on how many a plan fits."""

LITTLE = 0.01
"""Seconds below which whole milliseconds are too coarse."""


@dataclass(frozen=True, slots=True)
class Question:
    """The input of the guide: each batch size is planned for each number of workers, which are like those of `machine`.

    Only plans that keep to `request` are considered.
    """

    source: ModelSource
    batches: Sequence[int]
    sequence: int
    machine: Machine
    workers: Sequence[int]
    request: Request
    padding: bool = True
    kernels: MadeKernels | None = None
    """If given, kernels of the best plans are compiled, and plans are costed by them."""
    folder: Path | None = None
    """Folder for the selected plans, written as `batch-8-on-4.moai`."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The selected plan of one batch size on `workers` workers; `reason` says why there is none."""

    workers: int
    batch: int
    plan: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    """Peak bytes of the fullest worker."""
    reason: str = ""
    parts: Mapping[str, Number] = field(default_factory=dict[str, Number])
    """The parts of `seconds`."""
    functions: int = 0
    """Number of functions of the program; `known` counts those whose kernels are known."""
    known: int = 0
    tokens: int | None = None
    """Tokens of a row; None for a model that reads no rows of tokens."""

    @property
    def unit(self) -> str:
        return "rows" if self.tokens is None else "tokens"

    @property
    def rate(self) -> float:
        """Tokens per second, or rows where there are no tokens."""
        return self.batch * (self.tokens or 1) / self.seconds


def answers(question: Question, pool: CompilerPool) -> Iterator[Estimate]:
    """One estimate per batch size and number of workers, as it is known. Raises Diagnostic for an unknown model."""
    for batch in question.batches:
        step = captured_step(question.source, Sample(batch, question.sequence, padding=question.padding))
        for workers in question.workers:
            machine = replace(question.machine, workers=workers)
            answer = planned(step, batch, machine, question, pool)
            yield replace(answer, tokens=question.sequence if _reads_tokens(step, batch, question.sequence) else None)


def _reads_tokens(step: Module, batch: int, sequence: int) -> bool:
    """Whether rows of so many token ids are all that the step reads: beside a picture or a sound they are labels."""
    main = step.main
    inputs = [value.type for at, value in enumerate(main.params) if main.param_role(at).kind == "input"]
    return any(each.shape == (batch, sequence) for each in inputs) and not any(
        each.dtype in FLOATING for each in inputs
    )


def planned(step: Module, batch: int, machine: Machine, question: Question, pool: CompilerPool) -> Estimate:
    """The estimate for one step on one machine."""
    try:
        selection = _selected(step, machine, question, pool)
    except NoPlanFits as error:
        enough = (
            enough_workers(step, machine, question.request, pool) if machine.workers == max(question.workers) else None
        )
        more = f"; on {enough} workers one does" if enough else ""
        return Estimate(machine.workers, batch, reason=error.message + more)
    except Diagnostic as error:
        return Estimate(machine.workers, batch, reason=error.message)
    if question.folder is not None:
        write_output(question.folder / f"batch-{batch}-on-{machine.workers}.moai", render(selection.plan.module))
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


def enough_workers(step: Module, machine: Machine, request: Request, pool: CompilerPool) -> int | None:
    """A number of workers on which a plan fits: the first among those that double; None if none of them is enough."""
    for _ in range(DOUBLED):
        machine = replace(machine, workers=2 * machine.workers)
        try:
            search(step, machine, request, pool=pool, runs=False)
        except NoPlanFits:
            continue
        except Diagnostic:
            return None
        return machine.workers
    return None


def _selected(step: Module, machine: Machine, question: Question, pool: CompilerPool) -> Selection:
    """The best plan; with kernels, those of the best plan are compiled until it stays the best."""
    if question.kernels is None:
        return search(step, machine, question.request, pool=pool, runs=False)
    while True:
        known = replace(machine, made=question.kernels.known)
        selection = search(step, known, question.request, pool=pool, runs=False)
        if not question.kernels.make(selection.plan.programs.joint):
            return selection


def row(answer: Estimate, question: Question) -> str:
    """One line of a Markdown table with the columns of `HEAD`."""
    flavor = Host(answer.workers, question.machine.all_memory(answer.workers)).flavor(answer.workers)
    known = (flavor.name, str(answer.workers), str(answer.batch))
    if answer.reason:
        return markdown_row((*known, answer.reason, "", "", ""))
    figures = (_time(answer.seconds), f"{answer.rate:,.0f}", gib(answer.nbytes))
    return markdown_row((*known, f"`{answer.plan}`", *figures))


def sources(answer: Estimate) -> str:
    """A line of a Markdown list: the parts of the predicted seconds with the source of each."""
    parts = ", ".join(f"{part} {duration(each.value)} ({each.source})" for part, each in answer.parts.items())
    return (
        f"* batch {answer.batch} on {answer.workers}: {parts}; "
        f"kernels were made of {answer.known} of {answer.functions} functions"
    )


def head(unit: str = "tokens") -> str:
    """The first two lines of the table, whose rates are in this unit."""
    return markdown_head([each.format(unit=unit) for each in HEAD])


def _time(seconds: float) -> str:
    if seconds < LITTLE:
        return duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
