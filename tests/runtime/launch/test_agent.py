"""The relay of an agent: what it holds for workers that do not read, and a controller that sends anything."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.status import LINE
from moaic.runtime.launch import agent
from moaic.runtime.launch.host_check import answer_check
from moaic.runtime.launch.identity import Credentials
from moaic.runtime.launch.local_workers import LocalShare, LocalWorker
from moaic.runtime.protocol.frames import BYTES, Closed, Connection, encode
from moaic.runtime.protocol.host_messages import HostCode
from moaic.runtime.protocol.limits import LIMITS, Limits, Refused
from tests.runtime.mutations import Messages, Mutator

MOST_BYTES = 128 << 20

RANKS = range(2, 4)

MESSAGES: Messages = [
    ([HostCode.RELAY, [[2, [0]], [3, [-1]]], encode([1, [[0, [1]]]])], [b"block"]),
    ([HostCode.RELAY, [[3, []]], encode([1, []])], []),
    ([HostCode.KILL, 3], []),
    ([HostCode.SEEN], []),
]


class Lines:
    """Status lines that never change."""

    def lines(self, first: int, count: int) -> bytes:
        return bytes(LINE * count)


class Host:
    """A relay between a controller and two workers that are only sockets."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self.controller, end = socket.socketpair()
        pairs = [socket.socketpair() for _ in RANKS]
        self.workers = [Connection(here, BYTES) for here, _ in pairs]
        self.killed: list[int] = []
        channels = [LocalWorker(rank, worker) for rank, worker in zip(RANKS, self.workers, strict=True)]
        alive: Any = dict.fromkeys(RANKS).get
        workers: Any = SimpleNamespace(
            channels=channels, status=Lines(), kill=self.killed.append, ending=alive, is_stopped=alive
        )
        connection = Connection(end, BYTES, limits=limits)
        self.relay = agent._Relay(connection, workers)  # pyright: ignore[reportPrivateUsage]
        self._others: list[Any] = [connection, *(there for _, there in pairs)]

    def close(self) -> None:
        for each in (self.controller, *self.workers, *self._others):
            each.close()


def test_the_controller_waits_for_workers_that_do_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MOST_UNSENT", 1 << 20)
    host = Host()
    thread = threading.Thread(target=host.relay.run)
    thread.start()
    controller, block = Connection(host.controller, BYTES), bytearray(256 << 10)
    for _ in range(200):
        controller.post(encode([HostCode.RELAY, [[2, [0]]], b"body"]), [block])
    for _ in range(20):
        controller.push()
        thread.join(0.02)
        assert host.workers[0].unsent <= agent.MOST_UNSENT + len(block) + 200
    assert controller.unsent > 40 << 20
    host.controller.shutdown(socket.SHUT_RDWR)
    for each in host._others[1:]:  # pyright: ignore[reportPrivateUsage]
        each.close()
    thread.join(10)
    assert not thread.is_alive()
    host.close()


STARTS: Messages = [
    ([HostCode.START, "127.0.0.1", ["cpu", "cpu"], "memory", {"MOAI_LOG": "info"}], []),
    ([HostCode.GO, [[["127.0.0.1", 5, "host/a"], ["127.0.0.1", 6, "host/b"]], 0, 2, b"", b"", b"", 0]], []),
]


def test_a_start_of_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, share: LocalShare, **__: object) -> str:
        for each in share.listeners:
            each.close()
        return "started"

    monkeypatch.setattr(agent, "start", start)
    mutator, credentials = Mutator(0), Credentials("host/a", b"", b"", b"")
    outcomes: set[str] = set()
    for _ in range(1000):
        controller, end = socket.socketpair()
        controller.sendall(b"".join(mutator.stream([each]) for each in STARTS))
        controller.shutdown(socket.SHUT_WR)
        connection = Connection(end, BYTES)
        try:
            first = answer_check(connection, credentials)
            outcomes.add(str(agent._started(connection, credentials, first)))  # pyright: ignore[reportPrivateUsage]
        except (Refused, Closed, Diagnostic) as error:
            outcomes.add(type(error).__name__)
        connection.close()
        controller.close()
    assert outcomes == {"started", "Refused", "Closed", "Diagnostic"}


def fuzz(seed: int, streams: int) -> None:
    mutator, refused = Mutator(seed), 0
    tracemalloc.start()
    for _ in range(streams):
        host = Host(Limits(block_bytes=1 << 20, all_block_bytes=4 << 20))
        host.controller.sendall(mutator.stream(MESSAGES))
        host.controller.shutdown(socket.SHUT_WR)
        try:
            host.relay.run()
        except Refused:
            refused += 1
        assert set(host.killed) <= set(RANKS)
        host.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_BYTES, f"{peak:,} bytes"
    assert streams / 10 < refused < streams, refused


@pytest.mark.timeout(60)
def test_no_controller_does_more_than_be_refused() -> None:
    fuzz(seed=0, streams=2000)


@pytest.mark.exact
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_controller_of_many_does_more_than_be_refused(seed: int) -> None:
    fuzz(seed, streams=20_000)
