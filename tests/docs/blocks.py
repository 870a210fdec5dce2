"""The code blocks of Markdown pages, by kind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

LONG = "long"
"""The word behind a block's language that says that it takes more than seconds, and runs under the marker `exact`."""

FENCE = re.compile(r"^(?P<margin> *)```(?P<info>[^`\n]*)\n(?P<text>.*?)^(?P=margin)```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. `line` is that of its first line of text, counted from 1."""

    page: Path
    line: int
    language: str
    is_long: bool
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The pages whose blocks the tests run."""
    return [README, *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "tutorial").glob("README.md")]


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, in order. Raises ValueError for an info string that no block has."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        language, *words = found["info"].split() or [""]
        line = text.count("\n", 0, found.start()) + 2
        if words not in ([], [LONG]):
            raise ValueError(f"{page}:{line}: a block's info string is its language, then maybe `{LONG}`")
        margin = found["margin"]
        inside = "".join(each.removeprefix(margin) for each in found["text"].splitlines(keepends=True))
        yield Block(page, line, language, bool(words), inside)
