"""Writes the parameter guide, `docs/parameters/FAMILY.md`: the output of `moaic guide` for the tutorials' models.

`python docs/parameters.py [FAMILY…]`; planning all of them takes a while. Nothing in the tables is typed: sizes come
from `tutorial/families.py`, machines from `docs/machines/`, and the rest is predicted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moaic.capture.trace_only import ModelSource
from moaic.passes.perf.machine import Machine
from moaic.passes.perf.machine_text import from_text
from moaic.planner.processes import ProcessPool
from moaic.planner.request import parse_request
from moaic.predict.guide import Question, answers, head, row
from moaic.runtime.host.cores import cores

DOCS = Path(__file__).parent
ROOT = DOCS.parent

TITLES: Mapping[str, str] = {
    "llama2": "Llama 2",
    "llama3": "Llama 3",
    "mistral": "Mistral",
    "qwen": "Qwen 2.5",
    "baichuan2": "Baichuan 2",
    "gpt": "GPT",
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Runs worth a table: models of one size, on workers of one kind."""

    machine: str
    batches: Sequence[int]
    sequence: int
    workers: Sequence[int]
    plan: str = ""


SMALL = Setup("cpu", batches=(8, 32), sequence=256, workers=(1, 2))
"""The default of the tutorials: batches, rows and workers on this machine."""

PUBLISHED = Setup("h100", batches=(8,), sequence=2048, workers=(8,), plan="dp=8,tp=1,cp=1,micro_batches=1")
"""The published sizes on one host of GPUs; only data parallelism is looked at, to keep the pages quick to make."""


def main() -> None:
    for family in sys.argv[1:] or TITLES:
        path = DOCS / "parameters" / f"{family}.md"
        path.write_text("".join(page(family)), encoding="utf-8")


def page(family: str) -> Iterator[str]:
    """The text of a family's page, piece by piece."""
    yield f"# {TITLES[family]}: parameter guide\n\nMade by `python docs/parameters.py {family}`.\n\n{HEAD}"
    for size in sizes(family):
        setup = setup_of(family, size)
        yield f"\n## {size} on {machine_of(setup).name}\n\n{_said(setup)}\n\n{head()}\n"
        yield from (f"{line}\n" for line in table(family, size, setup))


HEAD = """\
Every figure is predicted by the planner for one training step and its optimizer's, none was measured: they say which
plan and which batch to begin with. *Needed* is the peak of the fullest worker, with parameters, gradients and the state
of AdamW.
"""


def setup_of(family: str, size: str) -> Setup:
    """Rows no longer than the model has positions for."""
    setup = SMALL if size == "small" else PUBLISHED
    most = getattr(_families().built_in(family, size), "max_position_embeddings", setup.sequence)
    return replace(setup, sequence=min(setup.sequence, most))


def _said(setup: Setup) -> str:
    kept = f" Only plans with `{setup.plan}` were looked at." if setup.plan else ""
    return f"{setup.sequence} tokens in a row.{kept} The machine is described in `docs/machines/{setup.machine}.json`."


def sizes(family: str) -> list[str]:
    """The sizes of the tutorial without `tiny`, which is for tests."""
    return [size for size in _families().FAMILIES[family].sizes if size != "tiny"]


def table(family: str, size: str, setup: Setup) -> Iterator[str]:
    """The rows of one table, as they become known."""
    pool = ProcessPool(cores())
    asked = question(family, size, setup)
    try:
        yield from (row(answer, asked) for answer in answers(asked, pool))
    finally:
        pool.close()


def question(family: str, size: str, setup: Setup) -> Question:
    found = _families().FAMILIES[family]
    own_code = isinstance(found.architecture, Path)
    source = ModelSource(str(found.architecture), found.sizes[size], trust_remote_code=own_code)
    request = parse_request(setup.plan)
    return Question(source, setup.batches, setup.sequence, machine_of(setup), setup.workers, request)


def machine_of(setup: Setup) -> Machine:
    return from_text((DOCS / "machines" / f"{setup.machine}.json").read_text(encoding="utf-8"))


def _families() -> Any:
    """The tutorials' module."""
    sys.path.insert(0, str(ROOT / "tutorial"))
    import families

    return families


if __name__ == "__main__":
    main()
