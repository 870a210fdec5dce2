"""The report of a run of `bench/gpu.py`: stored as JSON, rendered as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_findings import Check, Figure, Finding, LeftOut, decoded, encoded

from moaic.text.tables import markdown_head, markdown_row

DONE = "done"

HEAD = """\
# Measured on GPUs

`python bench/gpu.py` takes four minutes on a machine with one GPU and sixteen cores. It checks our own kernels and the
plans of small models there, then measures training steps beside `torch.compile` and eager PyTorch, and the kernels
beside Inductor's and Liger-Kernel's. Its parts are processes of their own, each alone on the GPU while it takes times:
what fails or is cut is said, and the rest stands. First steps are those of several processes that start at once.
`--json docs/measured/NAME.json` keeps what was found for this page.

Models are in bfloat16 throughout, with AdamW. *Wanted* is what the project is after. Peak memory is what `torch.cuda`
and `torch.moai` say of it; memory held is what the GPU had more of once a way's processes had ended. The controller's
CPU time is all that the person's process computes in a step, as a share of the step: launching cannot cost more.
"""

NONE = """\
**No GPU has been measured yet.** None was there when this was written: the kernels are proved in Triton's interpreter
and compiled for four GPUs, plans are proved on CPU workers, and `python bench/gpu.py --here` tries the script itself on
the CPU.
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """A part that has ended: the time that it had and took, in seconds, how it ended, and what it found until then."""

    name: str
    allotted: float
    seconds: float
    end: str
    """`DONE`, or what went wrong."""
    log: str
    """The end of what it printed, where something went wrong."""
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> list[Check]:
        return [each for each in self.checks if not each.passed]

    @property
    def checks(self) -> list[Check]:
        return [each for each in self.findings if isinstance(each, Check)]

    @property
    def figures(self) -> list[Figure]:
        return [each for each in self.findings if isinstance(each, Figure)]

    @property
    def left_out(self) -> list[LeftOut]:
        return [each for each in self.findings if isinstance(each, LeftOut)]

    @property
    def passed(self) -> bool:
        return self.end == DONE and not self.failed


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    date: str
    device: str
    versions: Mapping[str, str]
    here: bool
    """Whether it ran on the CPU, at tiny sizes: its figures say nothing."""
    limit: float
    """Seconds that it had."""
    seconds: float
    parts: tuple[Ended, ...]

    @property
    def passed(self) -> bool:
        return all(part.passed for part in self.parts)


def to_json(report: Report) -> str:
    parts = [
        {
            "name": part.name,
            "allotted_s": part.allotted,
            "seconds": part.seconds,
            "end": part.end,
            "log": part.log,
            "findings": [encoded(each) for each in part.findings],
        }
        for part in report.parts
    ]
    run = {"date": report.date, "device": report.device, "versions": report.versions, "here": report.here}
    return json.dumps({**run, "limit_s": report.limit, "seconds": report.seconds, "parts": parts}, indent=1) + "\n"


def from_json(text: str) -> Report:
    run: dict[str, Any] = json.loads(text)
    parts = tuple(
        Ended(
            part["name"],
            part["allotted_s"],
            part["seconds"],
            part["end"],
            part["log"],
            tuple(map(decoded, part["findings"])),
        )
        for part in run["parts"]
    )
    return Report(run["date"], run["device"], run["versions"], run["here"], run["limit_s"], run["seconds"], parts)


def page(folder: Path) -> str:
    """The page of the documentation: every report that is kept in a folder, the newest first."""
    reports = [from_json(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    shown = sorted((each for each in reports if not each.here), key=lambda each: each.date, reverse=True)
    return "\n".join([HEAD, *(markdown(each) for each in shown)] if shown else [HEAD, NONE])


def markdown(report: Report) -> str:
    return "\n".join([head(report), *(section(part) for part in report.parts), foot(report)])


def head(report: Report) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    tiny = (
        "\n\nOn the CPU, at tiny sizes: these figures prove the script, and say nothing of speed."
        if report.here
        else ""
    )
    return f"## {report.device}\n\n{report.date}; {versions}{tiny}\n"


def section(part: Ended) -> str:
    """One part: what failed first."""
    lines = [f"### {part.name}", "", *_verdicts(part)]
    if part.figures:
        lines += ["", *_table(part.figures)]
    lines += ["", *(f"* left out: {each.name}: {each.reason}" for each in part.left_out)] if part.left_out else []
    return "\n".join([*lines, ""])


def foot(report: Report) -> str:
    failed = [part.name for part in report.parts if not part.passed]
    verdict = f"**FAILED: {', '.join(failed)}**" if failed else "Everything that was checked holds."
    return f"{verdict} {report.seconds:.0f} of {report.limit:.0f} s.\n"


def _verdicts(part: Ended) -> Iterator[str]:
    if part.end != DONE:
        yield f"**FAILED: {part.end}**"
        yield f"\n```text\n{part.log.strip()}\n```\n"
    if part.failed:
        yield f"**FAILED: {len(part.failed)} of {len(part.checks)} checks**"
        yield ""
        yield from (f"* FAILED {each.name}: {' '.join(each.detail.split())}" for each in part.failed)
    elif part.checks:
        yield f"{len(part.checks)} checks passed, in {part.seconds:.0f} of {part.allotted:.0f} s."


def _table(figures: Sequence[Figure]) -> Iterator[str]:
    """A line for each way of doing each thing, a column for each name of a figure."""
    names = list(dict.fromkeys(each.name for each in figures))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for each in figures:
        rows.setdefault((each.subject, each.way), {})[each.name] = _cell(each)
    yield markdown_head(["", "way", *names])
    yield from (markdown_row([*row, *(cells.get(name, "") for name in names)]) for row, cells in rows.items())


def _cell(figure: Figure) -> str:
    value = f"{figure.value:,.0f}" if abs(figure.value) >= 100 else f"{figure.value:.3g}"
    wanted = f" (wanted {figure.wanted})" if figure.wanted else ""
    return f"{value} {figure.unit}".rstrip() + wanted
