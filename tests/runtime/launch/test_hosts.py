"""What the agent of another host says while its workers are started, in any form."""

from __future__ import annotations

import socket

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.flavors import Flavor, HostShare
from moaic.runtime.launch import hosts
from moaic.runtime.launch.gathering import Gathering
from moaic.runtime.launch.host_facts import facts
from moaic.runtime.launch.hosts import HostWorkers
from moaic.runtime.launch.identity import Authority
from moaic.runtime.launch.local_workers import LocalShare
from moaic.runtime.protocol.frames import BYTES
from moaic.runtime.protocol.host_messages import HostCode
from tests.runtime.mutations import Messages, Mutator

SHARE = HostShare("node2", "127.0.0.1", 2)

FLAVOR = Flavor("small", 3, 1 << 30, (SHARE,))

SAID: Messages = [([HostCode.HELLO, facts().encoded()], []), ([HostCode.READY, [5, 6]], [])]


def say_nothing(text: str) -> None:
    """What the user has to do or to know, to nobody."""


class StartedError(Exception):
    """All hosts have agreed."""


def test_an_agent_that_says_anything_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, share: LocalShare, **__: object) -> None:
        for each in share.listeners:
            each.close()
        raise StartedError

    monkeypatch.setattr(hosts, "start", start)
    mutator, found = Mutator(0), Gathering(Authority("test"), "127.0.0.1", (SHARE,), {}, {})
    outcomes: set[str] = set()
    for _ in range(500):
        agent, end = socket.socketpair()
        agent.sendall(b"".join(mutator.stream([each]) for each in SAID))
        agent.shutdown(socket.SHUT_WR)
        other = HostWorkers(SHARE, range(1, 3), end, BYTES)
        try:
            hosts._begin(FLAVOR, found, [other], BYTES, {}, say_nothing)  # pyright: ignore[reportPrivateUsage]
        except (StartedError, Diagnostic) as error:
            outcomes.add(type(error).__name__)
        other.close()
        agent.close()
    assert outcomes == {"StartedError", "Diagnostic"}
