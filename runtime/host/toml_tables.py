"""TOML files of the user, which are lists of tables. Errors state line and column."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from moaic.ir.errors import Diagnostic, TextSpan
from moaic.text.units import GIB, MIB, TIB

MOST: Final = 100_000
"""Most workers of a host, and most hosts that are alike."""

UNITS: Final = {"MB": MIB, "GB": GIB, "TB": TIB}


@dataclass(frozen=True, slots=True)
class TomlTable:
    """One table `[[kind]]`, its values, and the lines of the file."""

    kind: str
    path: Path
    lines: tuple[str, ...]
    first: int
    """Index of the table's first line, counted from 0."""
    values: Mapping[str, Any]
    example: str

    def check_keys(self, known: Collection[str]) -> None:
        """Raises Diagnostic for a key that such a table does not have."""
        for key in (key for key in self.values if key not in known):
            raise Diagnostic(f"a {self.kind} has no `{key}`", self.place(key), hint=self.example)

    def name(self) -> str:
        """The name; raises Diagnostic if it is missing or invalid."""
        name = self.values.get("name")
        if not isinstance(name, str) or not name or not name.isprintable():
            raise Diagnostic(f"a {self.kind} needs a name, a string", self.place("name"), hint=self.example)
        return name

    def workers(self) -> int:
        """The number of workers; raises Diagnostic if it is missing or invalid."""
        workers = self.values.get("workers")
        if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= MOST:
            raise Diagnostic(
                f"{self.kind} `{self.name()}` needs workers, an integer of at least 1",
                self.place("workers"),
                hint=self.example,
            )
        return workers

    def count(self) -> int:
        """How many there are that are alike: 1 unless said. Raises Diagnostic."""
        count = self.values.get("count", 1)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST:
            raise Diagnostic(f"count is an integer from 1 to {MOST}", self.place("count"), hint=self.example)
        return count

    def memory(self, most: int | None) -> int:
        """The memory in bytes, at most `most`; None if another host has it. Raises Diagnostic."""
        memory, place = self.values.get("memory"), self.place("memory")
        amount = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([MGT]B)", str(memory))
        nbytes = int(float(amount[1]) * UNITS[amount[2]]) if amount is not None else 0
        if nbytes == 0:
            raise Diagnostic(
                f'{self.kind} `{self.name()}` needs memory, an amount such as "16GB"', place, hint=self.example
            )
        if most is not None and nbytes > most:
            has = f"{most / GIB:.1f}GB"
            raise Diagnostic(f"{self.kind} `{self.name()}` has {memory} of memory, but this host has {has}", place)
        return nbytes

    def place(self, key: str) -> TextSpan:
        """The place of a key, or that of the table if it does not have the key."""
        begins = re.compile(rf"[\s\"']*{re.escape(key)}[\s\"']*=")
        for number, line in enumerate(self.lines[self.first + 1 :], self.first + 1):
            if line.lstrip().startswith("["):
                break
            if begins.match(line):
                return _span(self.path, number, line, key)
        return _span(self.path, self.first, self.lines[self.first], self.kind)


def read_tables(
    path: Path, kind: str, example: str, known: Sequence[str] = (), single: Sequence[str] = ()
) -> list[TomlTable]:
    """The tables `[[kind]]` of a file; none if there is no file. Raises Diagnostic.

    The file may contain nothing else but the other tables that are `known`, and one of each that is `single`.
    """
    found, lines = _read(path, example)
    for word, tables in found.items():
        is_right = isinstance(tables, dict) if word in single else _are_tables(tables)
        if word not in (kind, *known, *single) or not is_right:
            place, kinds = _begins(path, lines, word), " or ".join(f"[[{each}]]" for each in known or [kind])
            message = f"`{word}` is no list of tables {kinds}; {path.name} contains nothing else"
            if word in single:
                message = f"`{word}` is no table [{word}]"
            raise Diagnostic(message, place, hint=example)
    rows: list[Mapping[str, Any]] = found.get(kind, [])
    heads = [n for n, line in enumerate(lines) if re.match(rf"\s*\[\[[\s\"']*{kind}[\s\"']*\]\]", line)]
    # Tables may also be inline, `kind = [{...}]`: then there is no header for each.
    firsts = heads if len(heads) == len(rows) else [0] * len(rows)
    return [TomlTable(kind, path, lines, first, row, example) for first, row in zip(firsts, rows, strict=True)]


def read_single(path: Path, kind: str, example: str) -> TomlTable | None:
    """The table `[kind]` of a file; None if it has none, or there is no file. Raises Diagnostic."""
    found, lines = _read(path, example)
    values = found.get(kind)
    if not isinstance(values, dict):
        return None
    first = next((n for n, line in enumerate(lines) if re.match(rf"\s*\[?[\s\"']*{kind}\b", line)), 0)
    return TomlTable(kind, path, lines, first, cast("Mapping[str, Any]", values), example)


def _read(path: Path, example: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """What a file contains, nothing if there is none, and its lines. Raises Diagnostic."""
    try:
        # With or without the mark that editors of Windows begin a file with.
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return {}, ()
    except (OSError, UnicodeDecodeError) as error:
        raise Diagnostic(f"{path} cannot be read: {error}", hint=example) from None
    import tomllib  # slow, and most users have no such file

    try:
        found: Mapping[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _broken(path, text, str(error), example) from None
    return found, tuple(text.splitlines())


def _are_tables(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(each, dict) for each in cast("list[Any]", found))


def _broken(path: Path, text: str, error: str, example: str) -> Diagnostic:
    """The error of TOML's parser, with the place that its message states."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", error)
    lines = text.splitlines() or [""]
    message, line, column = found.groups() if found else (error, None, None)
    number = min(int(line or len(lines)), len(lines))
    return Diagnostic(message, TextSpan(str(path), number, int(column or 1), 1, lines[number - 1]), hint=example)


def _begins(path: Path, lines: Sequence[str], word: str) -> TextSpan:
    """The place of the first line that begins with a word, as the name of a table or as a key."""
    begins = re.compile(rf"[\s\[\"']*{re.escape(word)}\b")
    number = next((n for n, line in enumerate(lines) if begins.match(line)), 0)
    return _span(path, number, lines[number], word)


def _span(path: Path, number: int, line: str, word: str) -> TextSpan:
    return TextSpan(str(path), number + 1, max(0, line.find(word)) + 1, len(word), line)
