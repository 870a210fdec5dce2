"""Tables with borders of `+`, `-`, `|` and `=`, as people know them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GAP = 2
"""Spaces on both sides of a cell."""


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    align: Literal["<", ">"] = "<"
    least: int = 0
    """Characters that the column has at least, its gaps left out."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A caption at the right, if there is one, the titles, then the rows."""
    widths = [
        max(column.least, len(column.title), *(len(row[at]) for row in rows), 0) + 2 * GAP
        for at, column in enumerate(columns)
    ]
    inside = sum(widths) + len(widths) - 1
    thin, thick = f"+{'-' * inside}+", f"+{'=' * inside}+"
    titles = [f"{column.title:^{width}}" for column, width in zip(columns, widths, strict=True)]
    lines = [thin, *([f"|{caption + ' ' * GAP:>{inside}}|", thin] if caption else []), _line(titles), thick]
    for row in rows:
        cells = zip(columns, row, widths, strict=True)
        lines.append(_line([" " * GAP + f"{text:{c.align}{width - 2 * GAP}}" + " " * GAP for c, text, width in cells]))
    return "\n".join([*lines, thin])


def _line(cells: Sequence[str]) -> str:
    return f"|{'|'.join(cells)}|"
