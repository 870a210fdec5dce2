"""The page of the documentation that the sweep writes: counts of correct samples, and reasons of the others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from tests.opinfo.record import Line, Outcome

PAGE: Final = Path(__file__).parent.parent.parent / "docs" / "works.md"

SHOWN: Final = (Outcome.RIGHT, Outcome.REFUSED, Outcome.WRONG, Outcome.UNCLEAR, Outcome.LOST)

_HEAD: Final = """\
# What works

`make opinfo` runs what PyTorch tests its own devices with, the database of `torch.testing`, on device `moai` with two
workers, and compares each sample with plain PyTorch on the CPU: values, shapes, element types and, of what is not
compiled, strides. It wrote this page, with PyTorch {version}.

"""

_EXPLANATION: Final = """
*forward* and *backward* are calls op by op and their gradients, *strided* the same with operands that are not
contiguous, *in place* and *out=* calls that write into their operands, *modules* and *optimizers* those of
`torch.nn` and `torch.optim`, *compiled* calls through `torch.compile(backend="moai")` with their gradients, and *dp=2*
the same with the rows shared by the workers. Of ops that draw random numbers compiled calls are compared by shape.
*refused* samples end in an error of at most three lines that names the op, *unclear* ones in another error, and
*lost* ones with the workers.

"""


def table(found: Sequence[Line]) -> str:
    """Counts of outcomes by area."""
    counts: dict[str, Counter[Outcome]] = {}
    for line in found:
        counts.setdefault(line.case.area, Counter())[line.outcome] += 1
    rows = [f"| | samples | {' | '.join(SHOWN)} | right, % |", f"|---{'|--:' * (len(SHOWN) + 2)}|"]
    for area, of in counts.items():
        cells = " | ".join(str(of[outcome]) for outcome in SHOWN)
        rows.append(f"| {area} | {of.total()} | {cells} | {_percent(of)} |")
    return "\n".join(rows)


def _percent(counts: Counter[Outcome]) -> str:
    """Rounded down, so that only all is 100."""
    return f"{int(1000 * counts[Outcome.RIGHT] / counts.total()) / 10:.1f}"


def page(found: Sequence[Line]) -> str:
    parts = [_HEAD.format(version=torch.__version__.partition("+")[0]), table(found), "\n", _EXPLANATION]
    return "".join([*parts, "## What is not right\n\n", "\n".join(_reasons(found)), "\n"])


def _reasons(found: Iterable[Line]) -> Iterator[str]:
    """One row per area, outcome and reason, with the names of the cases."""
    rows: dict[tuple[str, Outcome, str], list[str]] = {}
    for line in found:
        if line.outcome is not Outcome.RIGHT:
            names = rows.setdefault((line.case.area, line.outcome, _reason(line.message)), [])
            if line.case.name not in names:
                names.append(line.case.name)
    yield from ("| area | outcome | cases | reason |", "|---|---|---|---|")
    for (area, outcome, reason), names in rows.items():
        yield f"| {area} | {outcome} | {', '.join(f'`{name}`' for name in names)} | {reason} |"


def _reason(message: str) -> str:
    """The start of a message, without what differs from run to run."""
    text = re.sub(r'(/[\w.+-]+){2,}|(?:at |")"?[\w.]+\.py"?:\d+', "…", " ".join(message.split()))
    short = text if len(text) <= 160 else f"{text[:157]}..."
    return short.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
