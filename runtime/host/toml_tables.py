"""TOML files that people write by hand: lists of tables. What is wrong in one is said with its line and column."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from moaic.ir.errors import Diagnostic, TextSpan
from moaic.text.units import GIB, MIB, TIB

UNITS: Final = {"MB": MIB, "GB": GIB, "TB": TIB}


@dataclass(frozen=True, slots=True)
class TomlTable:
    """One table `[[kind]]`, its values, and the lines that it stands in."""

    kind: str
    path: Path
    lines: tuple[str, ...]
    first: int
    """Index of its first line, counted from 0."""
    values: Mapping[str, Any]
    example: str

    def check_keys(self, known: Collection[str]) -> None:
        """Raises Diagnostic for a key that such a table has not."""
        for key in self.values.keys() - set(known):
            raise Diagnostic(f"a {self.kind} has no `{key}`", self.place(key), hint=self.example)

    def name(self) -> str:
        """Raises Diagnostic where there is none."""
        name = self.values.get("name")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise Diagnostic(f"a {self.kind} needs a name, a text", self.place("name"), hint=self.example)
        return name

    def workers(self) -> int:
        """Raises Diagnostic where it is no number of workers."""
        workers = self.values.get("workers")
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise Diagnostic(
                f"{self.kind} `{self.name()}` needs workers, a whole number from 1 on",
                self.place("workers"),
                hint=self.example,
            )
        return workers

    def memory(self, most: int | None) -> int:
        """Bytes, of which this host has `most`; None where another host has them. Raises Diagnostic."""
        memory, place = self.values.get("memory"), self.place("memory")
        amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT]B)", str(memory))
        nbytes = int(float(amount[1]) * UNITS[amount[2]]) if amount is not None else 0
        if nbytes == 0:
            raise Diagnostic(
                f'{self.kind} `{self.name()}` needs memory, an amount such as "16GB"', place, hint=self.example
            )
        if most is not None and nbytes > most:
            has = f"{most / GIB:.1f}GB"
            raise Diagnostic(f"{self.kind} `{self.name()}` has {memory} of memory, and this host has {has}", place)
        return nbytes

    def place(self, key: str) -> TextSpan:
        """Where a key stands, or where the table begins that lacks it."""
        begins = re.compile(rf"[\s\"']*{re.escape(key)}[\s\"']*=")
        for number, line in enumerate(self.lines[self.first + 1 :], self.first + 1):
            if line.lstrip().startswith("["):
                break
            if begins.match(line):
                return _span(self.path, number, line, key)
        return _span(self.path, self.first, self.lines[self.first], self.kind)


def read_tables(path: Path, kind: str, example: str) -> list[TomlTable]:
    """The tables `[[kind]]` of a file, which has nothing else; none where there is no file. Raises Diagnostic."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise Diagnostic(f"{path} cannot be read: {error}", hint=example) from None
    import tomllib  # most people have no such file, and tools are to answer at once

    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _broken(path, text, str(error), example) from None
    lines = tuple(text.splitlines())
    for word, tables in found.items():
        if word != kind or not _are_tables(tables):
            place = _begins(path, lines, word)
            raise Diagnostic(
                f"`{word}` is no list of tables [[{kind}]], of which {path.name} is made", place, hint=example
            )
    rows: list[Mapping[str, Any]] = found.get(kind, [])
    heads = [n for n, line in enumerate(lines) if re.match(rf"\s*\[\[[\s\"']*{kind}[\s\"']*\]\]", line)]
    # Tables may also be written in one line, `kind = [{...}]`.
    firsts = heads if len(heads) == len(rows) else [0] * len(rows)
    return [TomlTable(kind, path, lines, first, row, example) for first, row in zip(firsts, rows, strict=True)]


def _are_tables(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, dict) for each in cast("list[Any]", found))


def _broken(path: Path, text: str, error: str, example: str) -> Diagnostic:
    """What is wrong with a text that is no TOML, and where: its parser says both in one sentence."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", error)
    lines = text.splitlines() or [""]
    message, line, column = found.groups() if found else (error, None, None)
    number = min(int(line or len(lines)), len(lines))
    return Diagnostic(message, TextSpan(str(path), number, int(column or 1), 1, lines[number - 1]), hint=example)


def _begins(path: Path, lines: Sequence[str], word: str) -> TextSpan:
    """Where a word first begins a line, as the name of a table or as a key."""
    begins = re.compile(rf"[\s\[\"']*{re.escape(word)}\b")
    number = next((n for n, line in enumerate(lines) if begins.match(line)), 0)
    return _span(path, number, lines[number], word)


def _span(path: Path, number: int, line: str, word: str) -> TextSpan:
    return TextSpan(str(path), number + 1, max(0, line.find(word)) + 1, len(word), line)
