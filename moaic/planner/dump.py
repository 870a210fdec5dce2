"""Writes input and result of planning as text files to the folder that MOAI_DUMP names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.perf import machine_text
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.planner.log import configuration
from moaic.planner.outcome import Candidate
from moaic.planner.search import Selection
from moaic.text.tables import aligned_table, left
from moaic.text.units import MIB

COLUMNS = left("configuration", "fate", "step [ms]", "source", "peak [MiB]", "at rest [MiB]")


def dump(root: Path, step: Module, selection: Selection) -> Path:
    """Writes graph, candidates, machine, selected plan and programs under `root`, in a folder of the step's own.

    Returns that folder; its name follows from the graph, so that a second run of the same writes to the same place.
    Raises Diagnostic where it cannot write.
    """
    graph = render(step)
    folder = root / f"step-{hashlib.sha256(graph.encode()).hexdigest()[:8]}"
    programs = selection.plan.programs
    texts = {
        "graph.moai": graph,
        "candidates.txt": candidates_table(step, selection),
        "machine.json": machine_text.to_text(selection.machine) + "\n",
        "plan.moai": render(selection.plan.module),
        "joint.moai": render(programs.joint),
        "forward.moai": render(programs.forward),
    }
    if programs.backward is not None:
        texts["backward.moai"] = render(programs.backward)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Diagnostic(f"MOAI_DUMP: {error.filename} cannot be written: {error.strerror}") from error
    return folder


def candidates_table(step: Module, selection: Selection) -> str:
    """One line per candidate: the selected one, the possible ones by time, the dropped ones with their reasons."""
    ranked = selection.search_result.ranked
    rest = [candidate for candidate in selection.search_result.candidates if candidate.prediction is None]
    lines = aligned_table(COLUMNS, [_row(candidate) for candidate in (*ranked, *rest)])
    chosen = selection.search_result.of(selection.search_result.selected)
    parts = _parts(chosen)
    return "\n".join([f"selected: {configuration(step, chosen.config)}", *parts, "", *lines]) + "\n"


def _parts(candidate: Candidate) -> Sequence[str]:
    if candidate.prediction is None:
        return []
    return [
        f"  {part:<12}{1000 * number.value:10.2f} ms  {number.source}"
        for part, number in candidate.prediction.parts.items()
    ]


def _row(candidate: Candidate) -> tuple[str, ...]:
    memory, prediction = candidate.memory, candidate.prediction
    sizes = ("", "") if memory is None else (memory.peak, memory.parameters + memory.optimizer)
    seconds = None if prediction is None else prediction.seconds
    if seconds is not None and candidate.seconds is not None:
        seconds = Number(candidate.seconds, MeasureSource.MEASURED)
    return (
        candidate.told,
        candidate.outcome.partition("\n")[0],
        "" if seconds is None else f"{1000 * seconds.value:.1f}",
        "" if seconds is None else str(seconds.source),
        *(size if isinstance(size, str) else str(size // MIB) for size in sizes),
    )
