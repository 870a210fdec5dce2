"""`launcher = "connect"`: the user starts the agents, or something of the user's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.launchers.launcher import Invitation, Say

LEAST_CHARACTERS: Final = 32
"""Of a secret that a user chooses: what can be guessed is none."""


class Connect:
    """Says what the user has to run on each host."""

    name = "the user"

    def __init__(self, settings: ClusterSettings, environment: Mapping[str, str], say: Say) -> None:
        self._program = settings.command or "moaic"
        self._environment = environment
        self._say = say

    def place(self, shares: Sequence[HostShare], seconds: float) -> tuple[HostShare, ...]:
        return tuple(shares)

    def secrets(self, hosts: Sequence[str]) -> dict[str, str]:
        secret = self._environment.get("MOAI_TOKEN", "")
        if len(secret) < LEAST_CHARACTERS:
            raise Diagnostic(
                "agents that connect need a secret that they share with this program: MOAI_TOKEN, of at least "
                f"{LEAST_CHARACTERS} characters",
                hint="export MOAI_TOKEN=$(openssl rand -hex 32), here and where agents are started",
            )
        return dict.fromkeys(hosts, secret)

    def start(self, shares: Sequence[HostShare], invitation: Invitation) -> None:
        for share in shares:
            command = f"{self._program} {invitation.arguments(share.name)}"
            self._say(f"Waiting for host {share.name}. Run there, with MOAI_TOKEN as it is here: {command}")

    def failed(self) -> Mapping[str, str]:
        return {}

    def advice(self, host: str, invitation: Invitation) -> str:
        return f"try there: {self._program} {invitation.arguments(host)}"

    def end(self, seconds: float) -> None:
        pass
