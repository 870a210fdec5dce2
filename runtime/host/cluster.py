"""The hosts of a cluster, as the user lists them in `cluster.toml`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.toml_tables import TomlTable, read_tables

EXAMPLE: Final = 'a host reads [[host]] and, below, name = "node1", workers = 8 and memory = "256GB"'


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """One host, its number of workers, and the bytes that they have together."""

    name: str
    workers: int
    memory: int
    is_here: bool
    """Whether it is the host that this program runs on."""


def listed_hosts(path: Path, memory: int) -> list[ClusterHost]:
    """The hosts in the order of the file; none if there is no file. Raises Diagnostic for an invalid one.

    `memory` is the number of bytes that this host has for workers.
    """
    found: list[ClusterHost] = []
    for table in read_tables(path, "host", EXAMPLE):
        host = _listed(table, memory)
        if any(host.name == other.name or (host.is_here and other.is_here) for other in found):
            raise Diagnostic(f"host `{host.name}` is listed twice", table.place("name"))
        found.append(host)
    return found


def _listed(table: TomlTable, memory: int) -> ClusterHost:
    table.check_keys(("name", "workers", "memory"))
    name = table.name()
    is_here = _is_here(name)
    return ClusterHost(name, table.workers(), table.memory(memory if is_here else None), is_here)


def _is_here(name: str) -> bool:
    """Whether a name, with or without a domain, is that of this host."""
    ours = os.uname().nodename
    return name == "localhost" or name in (ours, ours.partition(".")[0]) or name.partition(".")[0] == ours
