"""The table of mapped calls in the documentation, updated by `python -m moaic.option.page docs/cuda.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from moaic.option.calls import mappings
from moaic.option.compile_modules import AutoCompile
from moaic.option.mapping import Mapping
from moaic.options import Choices
from moaic.text.tables import markdown_row

HEAD: Final = ("| call | in the mode |", "|---|---|")
MARK: Final = "<!-- calls -->"
"""Marks the start and the end of the table in the page."""


def with_table(page: str) -> str:
    """The page with a table of the current mappings."""
    before, _, after = page.split(MARK)
    return MARK.join((before, f"\n{table(mappings(AutoCompile(Choices())))}\n", after))


def table(mappings: Iterable[Mapping]) -> str:
    """A Markdown table with a row for each meaning, and the calls that have it."""
    return "\n".join((*HEAD, *_rows(mappings)))


def _rows(mappings: Iterable[Mapping]) -> Iterator[str]:
    calls: dict[str, list[str]] = {}
    for mapping in mappings:
        calls.setdefault(mapping.meaning, []).append(f"`{mapping.call}`")
    for meaning, listed in calls.items():
        yield markdown_row((", ".join(listed), meaning))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
