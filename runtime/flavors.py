"""Flavors: the sizes that an accelerator can have here, each with its workers and the memory that these have together.

Workers of one host share its memory: those that a whole host has divide all of it, and more of them have no more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moaic.ir.errors import Diagnostic, Span
from moaic.runtime.folders import config_folder
from moaic.runtime.memory import host_bytes
from moaic.runtime.threads import cores

SIZES: Final[Mapping[str, int]] = {"Small": 1, "Medium": 2, "Large": 4, "xLarge": 8}
"""Workers of the smallest flavors; larger ones are named by how often they hold an xLarge."""

MULTIPLES: Final = (1.5, 2, 3, 4, 6, 8, 12, 24, 48)

MOST_WORKERS: Final = 8
"""Workers started when nobody says how many, and carried even by a host of fewer cores."""

GIB: Final = 1 << 30
UNITS: Final = {"MB": 1 << 20, "GB": GIB, "TB": 1 << 40}


@dataclass(frozen=True, slots=True)
class Flavor:
    """A size of an accelerator."""

    size: str
    workers: int
    memory: int
    """Bytes of all workers together."""

    @property
    def name(self) -> str:
        """`Large.256GB`: what lists show."""
        gib = self.memory / GIB
        return f"{self.size}.{gib:.0f}GB" if gib >= 1 else f"{self.size}.{gib:.1f}GB"

    @property
    def per_worker(self) -> int:
        """Bytes of one worker."""
        return self.memory // self.workers


@dataclass(frozen=True, slots=True)
class Host:
    """What flavors are made from."""

    cores: int
    memory: int

    @property
    def workers(self) -> int:
        """How many workers take the whole host, and are started when nobody says how many."""
        return min(self.cores, MOST_WORKERS)

    def flavor(self, workers: int) -> Flavor:
        """Some workers with their share of the host's memory."""
        share = min(workers, self.workers) / self.workers
        return Flavor(_size(workers), workers, int(share * self.memory))


def this_host() -> Host:
    return Host(cores(), host_bytes())


def ladder(host: Host) -> list[Flavor]:
    """The usual sizes that the host carries, and the one that takes it whole."""
    usual = [*SIZES.values(), *(int(MOST_WORKERS * multiple) for multiple in MULTIPLES)]
    most = max(host.cores, MOST_WORKERS)
    return [host.flavor(workers) for workers in sorted({*(n for n in usual if n <= most), host.workers})]


def flavors(environment: Mapping[str, str]) -> list[Flavor]:
    """All flavors there are: the ladder of this host, then the person's own. Raises Diagnostic for a broken file."""
    path = config_folder(environment) / "flavors.toml"
    host = this_host()
    own = _own(path, host) if path.exists() else []
    taken = {flavor.size.lower() for flavor in own}
    return [*(flavor for flavor in ladder(host) if flavor.size.lower() not in taken), *own]


def named(text: str, known: Sequence[Flavor]) -> Flavor | None:
    """The flavor of a full name, or of its part before the memory; case says nothing."""
    wanted = text.strip().lower()
    return next((flavor for flavor in known if wanted in (flavor.name.lower(), flavor.size.lower())), None)


def asked_for(text: str, known: Sequence[Flavor]) -> Flavor:
    """The flavor that MOAI_FLAVOR or `torch.moai.set_flavor` names, or of so many workers. Raises Diagnostic."""
    found = named(text, known)
    if found is not None:
        return found
    if text.isdecimal() and int(text) >= 1:
        return this_host().flavor(int(text))
    names = ", ".join(flavor.name for flavor in known)
    raise Diagnostic(f"there is no flavor `{text}`", hint=f"give a number of workers, from 1 on, or one of {names}")


def _size(workers: int) -> str:
    usual = {count: size for size, count in SIZES.items()}
    return usual.get(workers, f"{workers / MOST_WORKERS:g}xLarge")


def _own(path: Path, host: Host) -> list[Flavor]:
    """The flavors of a file; raises Diagnostic with the line where it is broken."""
    import tomllib  # most people have no such file, and tools are to answer at once

    text = path.read_text(encoding="utf-8")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Diagnostic(*_broken(path, text, str(error)), hint=EXAMPLE) from None
    for word, found in tables.items():
        if word != "flavor" or not isinstance(found, list):
            raise Diagnostic(f"`{word}` is nothing that flavors are made of", _span(path, text, word), hint=EXAMPLE)
    rows: list[Mapping[str, Any]] = tables.get("flavor", [])
    return [_flavor(path, text, row, host) for row in rows]


EXAMPLE: Final = 'a flavor reads [[flavor]] and, below, name = "night", workers = 4 and perhaps memory = "16GB"'


def _flavor(path: Path, text: str, row: Mapping[str, Any], host: Host) -> Flavor:
    """One table of the file."""
    name, workers, memory = row.get("name"), row.get("workers"), row.get("memory")
    for key in row.keys() - {"name", "workers", "memory"}:
        raise Diagnostic(f"a flavor has no `{key}`", _span(path, text, key), hint=EXAMPLE)
    if not isinstance(name, str) or not name or not name.isprintable():
        raise Diagnostic("a flavor needs a name, a text", _span(path, text, "name"), hint=EXAMPLE)
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        place = _span(path, text, "workers", after=f'"{name}"')
        raise Diagnostic(f"flavor `{name}` needs workers, a whole number from 1 on", place, hint=EXAMPLE)
    if memory is None:
        return Flavor(name, workers, host.flavor(workers).memory)
    amount = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT]B)", str(memory))
    place = _span(path, text, "memory", after=f'"{name}"')
    if amount is None:
        raise Diagnostic(f'flavor `{name}` has memory = {memory!r}, which is no amount such as "16GB"', place)
    nbytes = int(float(amount[1]) * UNITS[amount[2]])
    if not 0 < nbytes <= host.memory:
        most = f"{host.memory / GIB:.1f}GB"
        raise Diagnostic(f"flavor `{name}` has {memory} of memory, and this host has {most}", place)
    return Flavor(name, workers, nbytes)


def _broken(path: Path, text: str, error: str) -> tuple[str, Span]:
    """What is wrong with a text that is no TOML, and where: its parser says both in one sentence."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", error)
    lines = text.splitlines() or [""]
    message, line, column = found.groups() if found else (error, None, None)
    number = min(int(line or len(lines)), len(lines))
    return message, Span(str(path), number, int(column or 1), 1, lines[number - 1])


def _span(path: Path, text: str, word: str, after: str = "") -> Span:
    """Where a word begins a line, from the first on that contains `after`; that line where there is none."""
    lines = text.splitlines()
    first = next((index for index, line in enumerate(lines) if after in line), 0)
    begins = re.compile(rf"[\s\[\"']*{re.escape(word)}\b")
    index = next((i for i, line in enumerate(lines[first:], first) if begins.match(line)), first)
    at = max(0, lines[index].find(word))
    return Span(str(path), index + 1, at + 1, len(word), lines[index])
