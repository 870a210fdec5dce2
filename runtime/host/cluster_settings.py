"""How the workers of other hosts are started: the table `[cluster]` of `cluster.toml`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.toml_tables import TomlTable, read_single

EXAMPLE: Final = 'for example launcher = "ssh" and listen = "10.0.0.1", the address of this host that the others reach'

PORTS: Final = range(1 << 16)
"""0 stands for any that is free."""

WAIT_SECONDS: Final = 60.0

MOST_SECONDS: Final = 600
"""Tokens of agents are valid no longer."""


class LauncherName(StrEnum):
    """What starts the agents of other hosts."""

    CONNECT = "connect"
    """The user, or something of the user's."""
    SSH = "ssh"
    RAY = "ray"
    SLURM = "slurm"


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The table of the file."""

    launcher: LauncherName
    listen: str = ""
    """The address of this host that the agents dial, and to which its workers' links lead; if empty, the one from which
    the first of the other hosts is reached."""
    port: int = 0
    """Where the controller listens; 0 for any that is free."""
    wait: float = WAIT_SECONDS
    """Seconds until a host that has not come counts as missing."""
    command: str = ""
    """The command line of moaic on the other hosts, such as `/opt/venv/bin/moaic`; each launcher has its default."""
    trusted_network: bool = False
    """Whether nobody else reaches the network between the hosts: then Ray may do without encryption and tokens."""


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "launcher": (str,),
    "listen": (str,),
    "port": (int,),
    "wait": (int, float),
    "command": (str,),
    "trusted_network": (bool,),
}


def cluster_settings(path: Path) -> ClusterSettings | None:
    """The settings of the file; None if it has none. Raises Diagnostic."""
    table = read_single(path, "cluster", EXAMPLE)
    if table is None:
        return None
    values = table.values
    table.check_keys(tuple(_KINDS))
    for key, kinds in _KINDS.items():
        if key in values and type(values[key]) not in kinds:
            raise _error(table, key, f"`{key}` of [cluster] cannot be {values[key]!r}")
    _check(table)
    others: dict[str, Any] = {key: value for key, value in values.items() if key != "launcher"}
    return ClusterSettings(LauncherName(values["launcher"]), **others)


def _check(table: TomlTable) -> None:
    values = table.values
    if values.get("launcher") not in list(LauncherName):
        raise _error(table, "launcher", f"[cluster] needs a launcher: one of {', '.join(LauncherName)}")
    if "listen" in values:
        _check_address(table)
    if values.get("port", 0) not in PORTS:
        raise _error(table, "port", f"port must be below {PORTS.stop}")
    if not 0 < values.get("wait", WAIT_SECONDS) <= MOST_SECONDS:
        raise _error(table, "wait", f"wait must be a number of seconds above 0, at most {MOST_SECONDS}")


def _check_address(table: TomlTable) -> None:
    try:
        address = ipaddress.ip_address(table.values["listen"])
    except ValueError:
        raise _error(table, "listen", "listen of [cluster] must be an IP address of this host") from None
    if address.is_unspecified:
        raise _error(table, "listen", f"[cluster] must not listen on every network, as {address} does")


def _error(table: TomlTable, key: str, message: str) -> Diagnostic:
    return Diagnostic(message, table.place(key), hint=EXAMPLE)
