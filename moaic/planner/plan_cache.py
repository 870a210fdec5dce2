"""A cache of selections on disk: a small JSON file for each hash of everything that a selection depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from moaic.ir.graph import Module
from moaic.ir.printer import render
from moaic.passes.config import Request
from moaic.passes.estimate.memory import Memory
from moaic.passes.estimate.step_time import EXPECTED_STEPS
from moaic.passes.perf import machine_text
from moaic.passes.perf.machine import Machine
from moaic.planner import log
from moaic.planner.autotune import Autotune
from moaic.planner.measured import MeasureKernels
from moaic.planner.outcome import Candidate, SearchResult
from moaic.planner.search import Selection, again, search
from moaic.planner.worker import CompilerPool, config_in, config_out, prediction_in, prediction_out
from moaic.text.files import write_whole


def search_cached(
    step: Module,
    where: Machine,
    request: Request,
    *,
    pool: CompilerPool,
    folder: Path | None,
    steps: int = EXPECTED_STEPS,
    measure: MeasureKernels | None = None,
    autotune: Autotune | None = None,
    runs: bool = True,
) -> Selection:
    """`search`, with its result read from `folder` if nothing that it depends on has changed; None is no cache."""
    path = _path(step, where, request, folder, steps, autotune)
    known = None if path is None else _read(path)
    if known is not None:
        log.found_again()
        return again(step, where, known)
    found = search(step, where, request, pool=pool, steps=steps, measure=measure, autotune=autotune, runs=runs)
    _keep(path, found.search_result)
    return found


def has_plans(folder: Path | None) -> bool:
    """Whether a folder has plans: then most programs find theirs there."""
    return folder is not None and any(folder.glob("plan-*.json"))


def remember(
    step: Module,
    where: Machine,
    request: Request,
    result: SearchResult,
    *,
    folder: Path | None,
    steps: int = EXPECTED_STEPS,
    autotune: Autotune | None = None,
) -> None:
    """Has `search_cached` return another result from now on: the plan of the one that it has did not fit in memory."""
    _keep(_path(step, where, request, folder, steps, autotune), result)


def _path(
    step: Module, where: Machine, request: Request, folder: Path | None, steps: int, autotune: Autotune | None
) -> Path | None:
    """The file of a result; None without a cache."""
    tried = "" if autotune is None else f"{autotune.count} {autotune.mode}"
    return None if folder is None else folder / f"plan-{fingerprint(step, where, request, steps, tried)}.json"


def _keep(path: Path | None, result: SearchResult) -> None:
    # A candidate that crashed is dropped because of a bug, and may succeed next time.
    has_crashed = any(candidate.crash for candidate in result.candidates)
    if path is not None and result.is_final and not has_crashed:
        _write(path, to_text(result))


def fingerprint(step: Module, where: Machine, request: Request, steps: int = EXPECTED_STEPS, tried: str = "") -> str:
    """A hash of graph, machine, request, expected steps, candidates that run, and the planner's sources."""
    decided = [sorted(asdict(request).items()), steps, tried]
    facts = [render(step), machine_text.to_text(where), *decided, planner_version()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


@cache
def planner_version() -> str:
    """A hash of the sources of planner, passes and ir, any of which may change the selection."""
    here = Path(__file__).parent
    return sources_hash(here, here.parent / "passes", here.parent / "ir")


def sources_hash(*folders: Path) -> str:
    """A hash of every Python file in these folders and below."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def to_text(search_result: SearchResult) -> str:
    """JSON of the selected configuration, its memory in other uses, and one object per candidate."""
    rows = [_candidate_out(candidate) for candidate in search_result.candidates]
    needs = {"apart": search_result.apart, "held": search_result.held, "steps": search_result.steps}
    return json.dumps({"selected": config_out(search_result.selected), **needs, "candidates": rows}, indent=1)


def from_text(text: str) -> SearchResult:
    data = json.loads(text)
    candidates = tuple(_candidate_in(row) for row in data["candidates"])
    return SearchResult(candidates, config_in(data["selected"]), data["apart"], data["held"], data["steps"])


def _candidate_out(candidate: Candidate) -> dict[str, Any]:
    return {
        "config": config_out(candidate.config),
        "memory": None if candidate.memory is None else asdict(candidate.memory),
        "prediction": None if candidate.prediction is None else prediction_out(candidate.prediction),
        "dropped": candidate.dropped,
        "others": candidate.others,
        "is_measured": candidate.is_measured,
        "seconds": candidate.seconds,
    }


def _candidate_in(row: Mapping[str, Any]) -> Candidate:
    memory = None if row["memory"] is None else Memory(**row["memory"])
    prediction = None if row["prediction"] is None else prediction_in(row["prediction"])
    told = {name: row[name] for name in ("dropped", "others", "is_measured", "seconds")}
    return Candidate(config_in(row["config"]), memory, prediction, **told)


def _read(path: Path) -> SearchResult | None:
    """The result in a file; None if there is no file, or a damaged one."""
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, text: str) -> None:
    """Writes the file atomically; a folder that is not writable is ignored."""
    with contextlib.suppress(OSError):
        write_whole(path, text)
