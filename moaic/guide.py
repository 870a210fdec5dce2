"""The parameter guide: what a model's training step is predicted to take on machines of different sizes.

The step is captured without weights, and planned as it would be for a run. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from moaic.capture.dry import Sample, Source, take_model
from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.passes.config import Request
from moaic.passes.machine import Machine
from moaic.passes.pool import Pool
from moaic.passes.registry import run_passes
from moaic.passes.search import search
from moaic.runtime.flavors import GIB, Host

HEAD = ("flavor", "workers", "batch", "plan", "step", "tokens/s", "needed per worker")


@dataclass(frozen=True, slots=True)
class Question:
    """What the guide is to say something about: each batch on each number of workers like those of `machine`.

    Only plans that keep to `request` count.
    """

    source: Source
    batches: Sequence[int]
    sequence: int
    machine: Machine
    workers: Sequence[int]
    request: Request


@dataclass(frozen=True, slots=True)
class Answer:
    """The selected plan of one batch on so many workers; `reason` says why there is none."""

    workers: int
    batch: int
    plan: str = ""
    seconds: float = 0.0
    nbytes: int = 0
    """Peak of the fullest worker."""
    reason: str = ""


def answers(question: Question, pool: Pool) -> Iterator[Answer]:
    """One answer per batch and number of workers, as soon as it is known. Raises Diagnostic for no model."""
    for batch in question.batches:
        step = captured_step(question.source, batch, question.sequence)
        for workers in question.workers:
            machine = replace(question.machine, workers=workers)
            yield _planned(step, batch, machine, question.request, pool)


def captured_step(source: Source, batch: int, sequence: int) -> Module:
    """The training step of a loop that reads the loss and nothing else."""
    captured = take_model(source, Sample(batch, sequence)).captured
    return run_passes(Module((captured.function,)), "zero")


def _planned(step: Module, batch: int, machine: Machine, request: Request, pool: Pool) -> Answer:
    try:
        fates = search(step, machine, request, pool=pool).fates
    except Diagnostic as error:
        return Answer(machine.workers, batch, reason=error.message)
    chosen = fates.of(fates.selected)
    assert chosen.prediction is not None
    assert chosen.memory is not None
    return Answer(machine.workers, batch, str(chosen.config), chosen.prediction.seconds.value, chosen.memory.peak)


def row(answer: Answer, question: Question) -> str:
    """One line of a Markdown table with the columns of `HEAD`."""
    flavor = Host(answer.workers, answer.workers * question.machine.memory).flavor(answer.workers)
    known = (flavor.name, str(answer.workers), str(answer.batch))
    if answer.reason:
        return _line(*known, answer.reason, "", "", "")
    rate = f"{answer.batch * question.sequence / answer.seconds:,.0f}"
    return _line(*known, f"`{answer.plan}`", _time(answer.seconds), rate, f"{answer.nbytes / GIB:.1f} GiB")


def head() -> str:
    """The first two lines of the table."""
    return f"{_line(*HEAD)}\n{_line(*['---'] * len(HEAD))}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
