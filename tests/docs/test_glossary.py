"""The identifiers of the glossary exist in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")


def first_cells() -> list[str]:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [row.split("|")[1].strip() for row in rows if not set(row) <= set("|- ")]


def words() -> list[str]:
    """Code in first columns."""
    return sorted({word for cell in first_cells() for word in re.findall(r"`([^`]+)`", cell)})


@cache
def identifiers() -> frozenset[str]:
    """Names of functions, classes, arguments, variables and attributes of the product."""
    paths = [path for folder in ("ir", "passes", "runtime", "moaic") for path in (ROOT / folder).rglob("*.py")]
    return frozenset(name for path in paths for name in names(ast.parse(path.read_text(encoding="utf-8"))))


def names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


@pytest.mark.parametrize("word", words())
def test_every_code_word_is_an_identifier(word: str) -> None:
    assert word in identifiers()


def test_every_row_has_as_many_cells_as_its_head() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({row.count("|") for row in table.splitlines()}) == 1, table.splitlines()[0]
