"""The table of mapped calls in the documentation: `python -m moaic.option.page docs/cuda.md` writes it anew."""

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
"""Stands in the page before the table and after it."""


def with_table(page: str) -> str:
    """The page with the table of what is mapped now."""
    before, _, after = page.split(MARK)
    return MARK.join((before, f"\n{table(mappings(AutoCompile(Choices())))}\n", after))


def table(mappings: Iterable[Mapping]) -> str:
    """A row of Markdown for each meaning, with the calls that have it."""
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
