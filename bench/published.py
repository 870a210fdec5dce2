"""Predicted beside published throughput: the planner's error on machines where moaic was not measured.

`python bench/published.py [ROW…] [--rows FILE.csv] [--json FILE]` prints a line per row, then the errors by kind of GPU
and by source, and those of each source predicted with constants that are fitted to the others (`published_fit`).
Machines are those of `moaic/predict/clusters` and `bench/clusters`, whose constants no row or source changes; what
software stacks add is in `published_stacks`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from statistics import correlation, median, quantiles

from published_fit import constants, kind_of, left_out
from published_pricing import Finding, finding
from published_rows import NAMED, Row, Skipped, command_line, is_accepted, row_of, wanted_rows


def report(findings: Iterable[Finding | Skipped]) -> Iterator[str]:
    """A line of a table as each row is known, then the errors of all."""
    yield "| row | GPU | plan | tokens/s published | predicted | error | GB published | predicted | error |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    known: list[Finding] = []
    skipped: list[Skipped] = []
    for each in findings:
        if isinstance(each, Skipped):
            skipped.append(each)
        else:
            known.append(each)
            yield _line(each)
    yield from ("", *(f"{each.name} cannot be simulated: {each.reason}" for each in skipped))
    yield from errors(known)


def _line(found: Finding) -> str:
    measured = "out of memory" if found.measured is None else f"{found.measured:,.0f}"
    error = "" if found.measured is None else f"{found.error:+.1%}"
    held, more = ("", "") if found.memory is None else (f"{found.memory:.1f}", f"{found.peak / found.memory - 1:+.1%}")
    fits = "" if found.fits else " (does not fit)"
    figures = (measured, f"{found.tokens:,.0f}", error, held, f"{found.peak:.1f}{fits}", more)
    note = f" ({found.note})" if found.note else ""
    return f"| {found.row} | {found.gpu} | {found.plan}{note} | {' | '.join(figures)} |"


def errors(known: Sequence[Finding]) -> Iterator[str]:
    """The errors of throughput and of memory, by kind of GPU and by source."""
    measured = [each for each in known if each.measured is not None]
    stated = [each for each in known if each.memory is not None]
    tables = {
        "throughput": [(each, each.error) for each in measured],
        "a source left out of the fit": left_out([each for each in measured if each.row not in NAMED]),
        "memory": [(each, each.peak / each.memory - 1) for each in stated if each.memory],
    }
    for title, found in tables.items():
        yield f"| {title} | rows | median error | 90th percentile | mean of signed errors | rank by MFU |"
        yield "| --- | ---: | ---: | ---: | ---: | ---: |"
        for name, group in _groups(found):
            yield _summary(name, group, _rank(group) if title == "throughput" else "")
        yield ""
    yield from constants([each for each in measured if each.row not in NAMED])
    without = [each for each in known if each.measured is None]
    yield f"{sum(not each.fits for each in without)} of {len(without)} rows that were out of memory do not fit."


def _summary(title: str, group: Sequence[tuple[Finding, float]], rank: str) -> str:
    signed = [error for _, error in group]
    sizes = sorted(map(abs, signed))
    high = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    figures = (f"{median(sizes):.1%}", f"{high:.1%}", f"{sum(signed) / len(signed):+.1%}", rank)
    return f"| {title} | {len(sizes)} | {' | '.join(figures)} |"


def _rank(group: Sequence[tuple[Finding, float]]) -> str:
    """Rank correlation of predicted and published utilization, which only rows of one source on one GPU have."""
    rows = [each for each, _ in group if each.measured is not None]
    if len(rows) < 3 or len({(each.gpu, each.source) for each in rows}) > 1:
        return ""
    predicted, published = ([each.flops * tokens(each) for each in rows] for tokens in (_predicted, _published))
    return f"{correlation(_ranks(predicted), _ranks(published)):.2f}"


def _predicted(found: Finding) -> float:
    return found.tokens


def _published(found: Finding) -> float:
    assert found.measured is not None
    return found.measured


def _ranks(values: Sequence[float]) -> list[int]:
    ordered = sorted(values)
    return [ordered.index(value) for value in values]


def _groups(found: Iterable[tuple[Finding, float]]) -> Iterator[tuple[str, list[tuple[Finding, float]]]]:
    groups: dict[str, list[tuple[Finding, float]]] = defaultdict(list)
    for each, error in found:
        titles = ("all", f"{kind_of(each.gpu)} and alike", f"{each.gpu}, {each.source}")
        for title in titles if each.row not in NAMED else ("named as anomalous",):
            groups[title].append((each, error))
    yield from sorted(groups.items())


def main() -> None:
    chosen = command_line(__doc__).parse_args()
    wanted = wanted_rows(chosen)
    accepted = [row_of(each) for each in wanted if is_accepted(each)]
    if lesser := len(wanted) - len(accepted):
        print(f"{lesser} of {len(wanted)} rows are left out: their quality is neither A nor A-.\n")
    findings: list[Finding] = []
    for line in report(_found(accepted, findings)):
        print(line, flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(each) for each in findings], indent=1), encoding="utf-8")


def _found(rows: Iterable[Row | Skipped], keep: list[Finding]) -> Iterator[Finding | Skipped]:
    for row in rows:
        found = row if isinstance(row, Skipped) else finding(row)
        if isinstance(found, Finding):
            keep.append(found)
        yield found


if __name__ == "__main__":
    main()
