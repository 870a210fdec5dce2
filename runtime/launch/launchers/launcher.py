"""What all launchers have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from shlex import join, quote
from typing import Protocol

from moaic.runtime.host.flavors import HostShare

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Invitation:
    """What an agent needs to join a job: where the program listens, and what its host proves itself by."""

    address: tuple[str, int]
    secrets: dict[str, str]
    """By host."""

    @property
    def connect(self) -> str:
        """The arguments of the command line of moaic that start an agent, except the name of its host."""
        ip, port = self.address
        where = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        return join(["agent", "--connect", where])

    def arguments(self, host: str) -> str:
        """Those of the command line of moaic that start the agent of a host there."""
        return f"{self.connect} --host {quote(host)}"


class Launcher(Protocol):
    """Starts the agents of the hosts of one job."""

    @property
    def name(self) -> str:
        """Of the program that starts them, in messages."""
        ...

    def place(self, shares: Sequence[HostShare], seconds: float) -> tuple[HostShare, ...]:
        """The hosts with the addresses at which they are reached. Takes at most `seconds`; raises Diagnostic."""
        ...

    def secrets(self, hosts: Sequence[str]) -> dict[str, str]:
        """What each host proves itself by. Raises Diagnostic."""
        ...

    def start(self, shares: Sequence[HostShare], invitation: Invitation) -> None:
        """Start the agents of all hosts, or say how the user does. Raises Diagnostic."""
        ...

    def failed(self) -> Mapping[str, str]:
        """The hosts whose agents cannot come any more, and why."""
        ...

    def advice(self, host: str, invitation: Invitation) -> str:
        """What to try if nobody has come from a host."""
        ...

    def end(self, seconds: float) -> None:
        """Wait until what runs here for the agents has ended, then end it."""
        ...
