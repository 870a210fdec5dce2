"""Tables as text: aligned columns, columns inside borders, and Markdown.

Rows are sequences of cells, one cell per column. `fitted` measures the columns of rows that are known; a table that is
printed row by row while its cells are computed states the widths as `Column.least` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

Row = Sequence[str]

SEPARATOR: Final = "  "
"""Blanks between two aligned columns."""

PADDING: Final = "  "
"""Blanks on both sides of a cell inside borders."""


@dataclass(frozen=True, slots=True)
class Column:
    """Title, alignment and least width of a column, in characters."""

    title: str = ""
    align: Literal["<", ">"] = "<"
    least: int = 0

    @property
    def width(self) -> int:
        return max(self.least, len(self.title))

    def aligned(self, cell: str) -> str:
        return f"{cell:{self.align}{self.width}}"


def left(*titles: str) -> tuple[Column, ...]:
    """Columns aligned to the left."""
    return tuple(map(Column, titles))


def right(*titles: str) -> tuple[Column, ...]:
    """Columns aligned to the right."""
    return tuple(Column(title, ">") for title in titles)


def fitted(columns: Sequence[Column], rows: Iterable[Row]) -> tuple[Column, ...]:
    """The columns, each as wide as its widest cell in `rows`."""
    widths = [column.least for column in columns]
    for row in rows:
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
    return tuple(replace(column, least=width) for column, width in zip(columns, widths, strict=True))


def aligned_row(columns: Sequence[Column], row: Row) -> str:
    """One line of a table of aligned columns, without blanks at its end."""
    cells = zip(columns, row, strict=True)
    return SEPARATOR.join(column.aligned(cell) for column, cell in cells).rstrip()


def aligned_head(columns: Sequence[Column]) -> str:
    """The titles, each aligned as the cells below it."""
    return aligned_row(columns, [column.title for column in columns])


def aligned_table(columns: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    """The lines of a whole table of aligned columns, titles first."""
    wide = fitted(columns, rows)
    return [aligned_head(wide), *(aligned_row(wide, row) for row in rows)]


def bordered_table(columns: Sequence[Column], rows: Sequence[Row], caption: str = "") -> str:
    """A table inside borders, its titles centered; `caption`, if given, stands above them at the right."""
    wide = fitted(columns, rows)
    widths = [column.width + 2 * len(PADDING) for column in wide]
    inside = sum(widths) + len(widths) - 1
    thin, thick = f"+{'-' * inside}+", f"+{'=' * inside}+"
    above = [f"|{caption + PADDING:>{inside}}|", thin] if caption else []
    titles = _between_bars([f"{column.title:^{width}}" for column, width in zip(wide, widths, strict=True)])
    body = [_between_bars(_padded(wide, row)) for row in rows]
    return "\n".join([thin, *above, titles, thick, *body, thin])


def _padded(columns: Sequence[Column], row: Row) -> Iterable[str]:
    return (f"{PADDING}{column.aligned(cell)}{PADDING}" for column, cell in zip(columns, row, strict=True))


def _between_bars(cells: Iterable[str]) -> str:
    return f"|{'|'.join(cells)}|"


def markdown_row(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def markdown_head(titles: Sequence[str]) -> str:
    """The two lines that begin a Markdown table."""
    return f"{markdown_row(titles)}\n{markdown_row(['---'] * len(titles))}"
