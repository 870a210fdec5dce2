"""What the agent of another host says while its workers are started, in any form."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.flavors import Flavor, HostShare
from moaic.runtime.launch import hosts
from moaic.runtime.launch.gathering import Gathering
from moaic.runtime.launch.host_facts import facts
from moaic.runtime.launch.hosts import HostWorkers
from moaic.runtime.launch.identity import Authority
from moaic.runtime.launch.local_workers import LocalShare
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import BYTES, encode, frame
from moaic.runtime.protocol.host_messages import MOST_CHARACTERS, HostCode
from tests.runtime.mutations import Messages, Mutator

SHARE = HostShare("node2", "127.0.0.1", 2)

FLAVOR = Flavor("small", 3, 1 << 30, (SHARE,))

SAID: Messages = [([HostCode.HELLO, facts().encoded()], []), ([HostCode.READY, [5, 6]], [])]


def say_nothing(text: str) -> None:
    """What the user has to do or to know, to nobody."""


@contextmanager
def says(*body: object, until: int | None = None) -> Generator[HostWorkers[bytearray]]:
    """A host whose agent says this, all its bytes or those `until` one, and no more."""
    agent, end = socket.socketpair()
    with agent, closing(HostWorkers(SHARE, range(1, 3), end, BYTES)) as other:
        agent.sendall(b"".join(frame(encode(list(body))))[:until])
        yield other


def test_what_another_host_says_stays_within_its_line() -> None:
    with (
        says(HostCode.FAILED, "no disk\n\x1b[2Jerror: yours", "x" * 100_000) as other,
        pytest.raises(Diagnostic) as caught,
    ):
        other.hear(HostCode.HELLO)
    assert caught.value.message == "host `node2`: no disk??[2Jerror: yours"
    assert len(caught.value.hint) == MOST_CHARACTERS


def test_a_host_without_gpus_for_workers_on_gpus() -> None:
    share = HostShare("node2", "127.0.0.1", 2, 2)
    flavor = replace(FLAVOR, hosts=(share,), gpus=1)
    found = Gathering(Authority("test"), "127.0.0.1", ("node2",), (share,), {}, {})
    begin = hosts._begin  # pyright: ignore[reportPrivateUsage]
    with (
        says(HostCode.HELLO, facts().encoded()) as other,
        pytest.raises(Diagnostic, match=r"host `node2` has no GPU for 2 workers: "),
    ):
        begin(flavor, Carrier.MEMORY, found, [other], BYTES, {}, say_nothing)


def test_the_end_of_a_worker_stays_within_its_line() -> None:
    with says(HostCode.ENDED, 1, "it was killed\x1b[1m\n") as other:
        other.pull()
        assert other.next() is None
        assert other.ending(1) == "it was killed?[1m?"


def test_a_refusal_that_quotes_another_host_stays_within_its_line() -> None:
    with says(HostCode.ENDED, "\x1b[2J\n" * 1000, "") as other:
        other.pull()
        ending = other.ending(2)
    assert ending is not None
    assert ending.isprintable()
    assert len(ending) == MOST_CHARACTERS


def test_an_agent_that_never_ends_a_message_is_not_waited_for() -> None:
    with says(HostCode.HELLO, "x", until=-1) as other, pytest.raises(Diagnostic, match="has not answered for 30 s"):
        other.hear(HostCode.HELLO, time.monotonic())


def test_an_answer_that_came_in_time_is_heard_later() -> None:
    with says(HostCode.HELLO, "x") as other:
        assert other.hear(HostCode.HELLO, time.monotonic() - 1) == "x"


class StartedError(Exception):
    """All hosts have agreed."""


def test_an_agent_that_says_anything_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, share: LocalShare, **__: object) -> None:
        for each in share.listeners:
            each.close()
        raise StartedError

    monkeypatch.setattr(hosts, "start", start)
    mutator, found = Mutator(0), Gathering(Authority("test"), "127.0.0.1", ("node2",), (SHARE,), {}, {})
    outcomes: set[str] = set()
    for _ in range(500):
        agent, end = socket.socketpair()
        agent.sendall(b"".join(mutator.stream([each]) for each in SAID))
        agent.shutdown(socket.SHUT_WR)
        other = HostWorkers(SHARE, range(1, 3), end, BYTES)
        try:
            begin = hosts._begin  # pyright: ignore[reportPrivateUsage]
            begin(FLAVOR, Carrier.MEMORY, found, [other], BYTES, {}, say_nothing)
        except (StartedError, Diagnostic) as error:
            outcomes.add(type(error).__name__)
        other.close()
        agent.close()
    assert outcomes == {"StartedError", "Diagnostic"}
