"""Text that is on every machine: the source of Python's own standard library."""

from __future__ import annotations

import random
import sys
import sysconfig
from pathlib import Path

SKIPPED = frozenset({"site-packages", "test", "tests", "idle_test", "__pycache__"})

SHORTEST = 60
"""Characters from which a definition is worth a row of its own."""


def source_files() -> list[Path]:
    """The standard library's own files, without its tests."""
    library = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(library.rglob("*.py")) if not SKIPPED & set(path.relative_to(library).parts)]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="ignore")


def definitions(path: Path) -> list[str]:
    """A file's top-level definitions: what two empty lines separate."""
    return [f"{text}\n\n\n" for text in read(path).split("\n\n\n")]


def library_texts(count: int) -> list[str]:
    """`count` definitions drawn from the whole library, each time the same. Exits where there are fewer."""
    texts = [text for path in source_files() for text in definitions(path) if len(text) >= SHORTEST]
    if count > len(texts):
        sys.exit(f"the standard library has {len(texts)} definitions, not {count}")
    return random.Random(0).sample(texts, count)
