"""The agents of the other hosts of a job: asked for, waited for, and let in by the program's port."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.addresses import LOOPBACK, facing, with_number
from moaic.runtime.launch.enrolment import Listener, Tokens, token_of
from moaic.runtime.launch.identity import Authority
from moaic.runtime.launch.launchers.launcher import Invitation, Launcher, Say
from moaic.runtime.protocol.tls import TlsStream

POLL_SECONDS: Final = 0.2
"""Interval at which launchers are asked for agents that cannot come any more."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """The hosts of a job, and who has come."""

    authority: Authority
    """Of the certificates of this job."""
    address: str
    """Of this host, where the others reach it."""
    names: tuple[str, ...]
    """All other hosts in the order in which they were asked for; a launcher may have named them anew."""
    shares: tuple[HostShare, ...]
    """All other hosts that have an address, as a number."""
    streams: dict[str, TlsStream]
    """To the agents that have come, by host."""
    problems: dict[str, Diagnostic]
    """Why the others have not, by host."""

    def check(self) -> None:
        """Raises the first of the problems, if there are any."""
        for problem in self.problems.values():
            raise problem

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()


def gather(
    hosts: Sequence[HostShare], settings: ClusterSettings, launcher: Launcher, say: Say, *, partly: bool = False
) -> Gathering:
    """Let the launcher start the agents of hosts and wait until they have come, at most `settings.wait` seconds.

    Raises Diagnostic if nobody can come or, unless `partly`, a host has no address.
    """
    placed = launcher.place(hosts, settings.wait)
    shares, problems = _numbered(placed)
    address = settings.listen or (facing(shares[0].address) if shares else LOOPBACK)
    names = tuple(share.name for share in placed)
    found = Gathering(Authority(token_hex(8)), address, names, shares, {}, problems)
    if not partly:
        found.check()
    secrets = launcher.secrets([share.name for share in shares])
    tokens = Tokens({host: token_of(secret, host) for host, secret in secrets.items()})
    arrivals = queue.SimpleQueue[tuple[str, TlsStream]]()

    def arrived(host: str, stream: TlsStream) -> None:
        arrivals.put((host, stream))

    def refused(address: str, reason: str) -> None:
        say(f"an agent at {address} was refused: {reason}")

    listener = Listener(found.address, settings.port, found.authority, tokens, arrived, refused)
    try:
        invitation = Invitation((found.address, listener.port), secrets)
        launcher.start(shares, invitation)
        _await(found, arrivals, launcher, settings.wait)
        _note_absent(found, invitation, launcher, settings.wait, partly=partly)
    except BaseException:
        found.close()
        raise
    finally:
        listener.close()
    return found


def _numbered(hosts: Sequence[HostShare]) -> tuple[tuple[HostShare, ...], dict[str, Diagnostic]]:
    """The hosts with the numbers of their addresses, and what is wrong with the addresses of the others."""
    shares: list[HostShare] = []
    problems: dict[str, Diagnostic] = {}
    for share in hosts:
        try:
            shares.append(with_number(share))
        except Diagnostic as error:
            problems[share.name] = error
    return tuple(shares), problems


def _await(
    found: Gathering, arrivals: queue.SimpleQueue[tuple[str, TlsStream]], launcher: Launcher, seconds: float
) -> None:
    """Wait for all hosts that can still come."""
    until = time.monotonic() + seconds
    awaited = {share.name for share in found.shares}
    while awaited and (left := until - time.monotonic()) > 0:
        try:
            host, stream = arrivals.get(timeout=min(left, POLL_SECONDS))
            found.streams[host] = stream
            awaited.discard(host)
        except queue.Empty:
            for host, words in launcher.failed().items():
                if host in awaited:
                    message = f"the agent of host `{host}` could not be started by {launcher.name}: {words}"
                    found.problems[host] = Diagnostic(message)
                    awaited.discard(host)


def _note_absent(found: Gathering, invitation: Invitation, launcher: Launcher, seconds: float, *, partly: bool) -> None:
    """Note who has not come: unless `partly`, in each problem all of them, as only the first one is told."""
    absent = [share.name for share in found.shares if share.name not in {**found.streams, **found.problems}]
    for host in absent:
        names = ", ".join(f"`{name}`" for name in ([host] if partly else absent))
        found.problems[host] = Diagnostic(
            f"nobody on {names} answered within {seconds:g} s", hint=launcher.advice(host, invitation)
        )
