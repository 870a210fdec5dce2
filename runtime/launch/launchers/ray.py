"""`launcher = "ray"`: Ray finds nodes for the hosts and starts the agents there; nothing of a step goes through it.

Ray lives in a process of its own (`ray_driver.py`): its threads would make forks of the program unsafe, and the program
may use Ray itself.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.addresses import with_number
from moaic.runtime.launch.enrolment import new_token
from moaic.runtime.launch.launchers.launcher import Invitation, Say
from moaic.runtime.launch.launchers.processes import Processes, write_line

SAFE: Final[Mapping[str, Sequence[str]]] = {"RAY_USE_TLS": ("1", "true"), "RAY_AUTH_MODE": ("token",)}
"""What makes Ray's own connections safe: whoever talks to Ray may run any code on its nodes."""

FILES: Final = ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
"""What Ray reads for TLS; where one is missing it tries to connect for a minute."""

DRIVER: Final = "driver"

CONNECT_SECONDS: Final = 20.0
"""Time that the driver has to connect: where token or certificates do not fit, Ray tries again and again."""

SLACK_SECONDS: Final = 5.0
"""Time that the driver has beyond that of the placement, to say why there is none."""


class Ray:
    """A placement group with a bundle for each host, and a task in each that runs the agent."""

    name = "Ray"

    def __init__(self, settings: ClusterSettings, environment: Mapping[str, str], say: Say) -> None:
        if find_spec("ray") is None:
            raise Diagnostic('launcher = "ray" needs Ray, which is not installed', hint="pip install 'moaic[cluster]'")
        _check_protection(environment, settings.trusted_network)
        self._program = settings.command
        self._processes = Processes(self.name)
        self._driver: subprocess.Popen[bytes] | None = None
        self._hosts: list[str] = []
        self._failed: dict[str, str] = {}

    def place(self, shares: Sequence[HostShare], seconds: float) -> tuple[HostShare, ...]:
        self._hosts = [share.name for share in shares]
        command = [sys.executable, "-P", "-m", "moaic.runtime.launch.launchers.ray_driver"]
        self._driver = self._processes.start(DRIVER, command, answers=True)
        hosts = [{"name": each.name, "needs": _needs(each), "address": _wanted(each)} for each in shares]
        write_line(self._driver, json.dumps({"seconds": seconds, "hosts": hosts}))
        self._answer(CONNECT_SECONDS)
        addresses = self._answer(seconds + SLACK_SECONDS)
        return tuple(share._replace(address=address) for share, address in zip(shares, addresses, strict=True))

    def secrets(self, hosts: Sequence[str]) -> dict[str, str]:
        return {host: new_token() for host in hosts}

    def start(self, shares: Sequence[HostShare], invitation: Invitation) -> None:
        assert self._driver is not None
        agents = [(self._program, invitation.arguments(host), invitation.secrets[host]) for host in self._hosts]
        write_line(self._driver, json.dumps(agents))

    def failed(self) -> Mapping[str, str]:
        while (answer := self._next_answer(0.0)) is not None:
            host, words = answer
            self._failed[host] = words
        words = self._processes.ended().get(DRIVER)
        return self._failed if words is None else {**dict.fromkeys(self._hosts, words), **self._failed}

    def advice(self, host: str, invitation: Invitation) -> str:
        return "look at that node by `ray status`, and at its firewall"

    def end(self, seconds: float) -> None:
        if self._driver is not None and self._driver.stdin is not None:
            self._driver.stdin.close()
        self._processes.end(seconds)

    def _answer(self, seconds: float) -> Any:
        """The next answer of the driver. Raises Diagnostic if it gives none."""
        assert self._driver is not None
        until = time.monotonic() + seconds
        while (answer := self._next_answer(until - time.monotonic())) is None:
            if words := self._processes.ended().get(DRIVER):
                raise Diagnostic(f"Ray: {words}")
            if time.monotonic() > until:
                last = self._processes.said(DRIVER).rpartition("\n")[2].rpartition("] ")[2]
                raise Diagnostic(
                    f"Ray has not answered within {seconds:g} s{last and f'; its last words: {last}'}",
                    hint="RAY_ADDRESS, RAY_AUTH_TOKEN (or its path) and RAY_TLS_* must be those of the nodes",
                )
        return answer

    def _next_answer(self, seconds: float) -> Any:
        """The next answer of the driver; None if there is none within that time, or ever."""
        assert self._driver is not None
        assert self._driver.stdout is not None
        if not select.select([self._driver.stdout], [], [], max(0.0, seconds))[0]:
            return None
        line = self._driver.stdout.readline()
        if not line:
            self._driver.wait()
            return None
        return json.loads(line)


def _check_protection(environment: Mapping[str, str], is_trusted: bool) -> None:
    """Raises Diagnostic for a Ray that anybody could use, and for files that are not there."""
    lacks = [f"{name}={values[0]}" for name, values in SAFE.items() if environment.get(name, "").lower() not in values]
    if lacks and not is_trusted:
        raise Diagnostic(
            f"Ray is not protected, as {' and '.join(lacks)} is not set: whoever reaches it may run any code",
            hint="start Ray and this program with them, or declare trusted_network = true in [cluster] if nobody "
            "else reaches these hosts",
        )
    for name in FILES if environment.get("RAY_USE_TLS", "").lower() in SAFE["RAY_USE_TLS"] else ():
        if not Path(environment.get(name, "")).is_file():
            raise Diagnostic(f"{name} names no file, and Ray uses TLS", hint="set it as for `ray start`")


def _needs(share: HostShare) -> dict[str, int]:
    """What Ray has to set aside on a node: it gives the same GPUs to nobody else, and shows the agent these alone."""
    return {"CPU": share.workers, **({"GPU": share.gpus} if share.gpus else {})}


def _wanted(share: HostShare) -> str:
    """The address of the node that a host has to be, as a number; empty if it may be any. Raises Diagnostic."""
    return "" if share.address == share.name else with_number(share).address
