"""The hosts of a cluster, as the user lists them in `cluster.toml`; the planner reads its devices and links, too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.gpu_specs import TARGETS
from moaic.runtime.host.toml_tables import TomlTable, read_tables

EXAMPLE: Final = 'a host reads [[host]] and, below, name = "node1", workers = 8 and memory = "256GB"'

HOST_KEYS: Final = ("name", "address", "workers", "memory", "device", "count")

TABLES: Final = ("device", "link", "host")
"""What the file may contain any number of."""

SINGLE: Final = ("cluster",)
"""What it may contain once (`cluster_settings`)."""


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """One host, its number of workers, and the bytes that they have together."""

    name: str
    workers: int
    memory: int
    address: str
    """The name or address by which the others reach it; of several that are alike, the name of each."""
    is_here: bool
    """Whether it is the host that this program runs on."""


def listed_hosts(path: Path, memory: int) -> list[ClusterHost]:
    """The hosts in the order of the file; none if there is no file. Raises Diagnostic for an invalid one.

    `memory` is the number of bytes that this host has for workers.
    """
    devices = {table.name(): table for table in read_tables(path, "device", EXAMPLE, TABLES, SINGLE)}
    found: list[ClusterHost] = []
    for table in read_tables(path, "host", EXAMPLE, TABLES, SINGLE):
        for host in _listed(table, memory, devices):
            if any(host.name == other.name or (host.is_here and other.is_here) for other in found):
                raise Diagnostic(f"host `{host.name}` is listed twice", table.place("name"))
            found.append(host)
    return found


def _listed(table: TomlTable, memory: int, devices: Mapping[str, TomlTable]) -> Iterator[ClusterHost]:
    """One host, or `count` of them: `node` is `node1`, `node2` and so on."""
    table.check_keys(HOST_KEYS)
    name, count = table.name(), table.count()
    for each in [name] if count == 1 else [f"{name}{number}" for number in range(1, count + 1)]:
        is_here = _is_here(each)
        most = memory if is_here else None
        device = devices.get(str(table.values.get("device", next(iter(devices), ""))))
        nbytes = None if device is None or "memory" in table.values else _memory_of(device)
        bytes_of_all = table.memory(most) if nbytes is None else table.workers() * nbytes
        yield ClusterHost(each, table.workers(), bytes_of_all, _address(table, each, count), is_here)


def _address(table: TomlTable, name: str, count: int) -> str:
    address = table.values.get("address")
    if address is None:
        return name
    if not isinstance(address, str) or not address or count > 1:
        raise Diagnostic(
            f"the address of host `{table.name()}` is the name or number by which one host is reached",
            table.place("address"),
            hint=EXAMPLE,
        )
    return address


def _memory_of(device: TomlTable) -> int | None:
    """Bytes of a device: those that the file states, or those of its target."""
    if "memory" in device.values:
        return device.memory(None)
    target = TARGETS.get(str(device.values.get("target")))
    return None if target is None else target.memory


def _is_here(name: str) -> bool:
    """Whether a name, with or without a domain, is that of this host."""
    ours = os.uname().nodename
    return name == "localhost" or name in (ours, ours.partition(".")[0]) or name.partition(".")[0] == ours
