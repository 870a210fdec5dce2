"""`launcher = "ssh"`: an agent is a command that ssh runs on its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from moaic.runtime.host.cluster_settings import ClusterSettings
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.enrolment import new_token
from moaic.runtime.launch.launchers.launcher import Invitation, Say
from moaic.runtime.launch.launchers.processes import Processes, write_line

SSH: Final = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
"""Asks nothing: nobody could answer."""


class Ssh:
    """A process of ssh for each host, which gives the agent its secret by standard input."""

    name = "ssh"

    def __init__(self, settings: ClusterSettings, environment: Mapping[str, str], say: Say) -> None:
        self._program = settings.command or "moaic"
        self._processes = Processes(self.name)

    def place(self, shares: Sequence[HostShare], seconds: float) -> tuple[HostShare, ...]:
        return tuple(shares)

    def secrets(self, hosts: Sequence[str]) -> dict[str, str]:
        return {host: new_token() for host in hosts}

    def start(self, shares: Sequence[HostShare], invitation: Invitation) -> None:
        for share in shares:
            command = [*SSH, share.address, f"{self._program} {invitation.arguments(share.name)}"]
            process = self._processes.start(share.name, command)
            write_line(process, invitation.secrets[share.name])

    def failed(self) -> Mapping[str, str]:
        return self._processes.ended()

    def advice(self, host: str, invitation: Invitation) -> str:
        return f"try there: {self._program} {invitation.arguments(host)}"

    def end(self, seconds: float) -> None:
        self._processes.end(seconds)
