"""A check of hosts of which some fail in the middle: the others are measured, and each failure has its message."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from moaic.runtime.host.cluster_settings import ClusterSettings, LauncherName
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch import cluster_check
from moaic.runtime.launch.cluster_check import CheckedCluster, check_cluster
from moaic.runtime.launch.gathering import Gathering
from moaic.runtime.launch.host_check import answer_check
from moaic.runtime.launch.host_facts import facts
from moaic.runtime.launch.identity import Authority, Credentials, client_context, host_name, server_context
from moaic.runtime.protocol.frames import BYTES, Closed, Connection
from moaic.runtime.protocol.host_messages import FolderState, HostCode
from moaic.runtime.protocol.tls import TlsStream

LOCAL = "127.0.0.1"

Agent = Callable[[Connection[bytearray], Credentials], object]


def well(connection: Connection[bytearray], credentials: Credentials) -> None:
    connection.send([HostCode.HELLO, facts().encoded()])
    assert answer_check(connection, credentials) == [HostCode.DONE]


def ends(connection: Connection[bytearray], credentials: Credentials) -> None:
    connection.send([HostCode.HELLO, facts().encoded()])
    connection.receive()


def lies(connection: Connection[bytearray], credentials: Credentials) -> None:
    connection.send([HostCode.HELLO, facts().encoded()])
    connection.receive()
    connection.send([HostCode.CHECKED, ["much", "g++"]])


def is_silent(connection: Connection[bytearray], credentials: Credentials) -> None:
    connection.send([HostCode.HELLO, facts().encoded()])
    with suppress(Closed):
        while True:
            connection.receive()


def is_older(connection: Connection[bytearray], credentials: Credentials) -> None:
    connection.send([HostCode.HELLO, replace(facts(), version=1).encoded()])


def greets_otherwise(connection: Connection[bytearray], credentials: Credentials) -> None:
    connection.send([HostCode.HELLO, [1, "0.0.1"]])


def connected_sockets() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection by TCP."""
    with socket.create_server((LOCAL, 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def gathered(agents: dict[str, Agent]) -> Gathering:
    """The hosts of a job; each agent is a thread at the other end of a connection."""
    job = Authority("j")
    shares = tuple(HostShare(name, LOCAL, 1) for name in agents)
    found = Gathering(job, LOCAL, tuple(agents), shares, {}, {})
    context = server_context(job.credentials("controller"))
    for name, agent in agents.items():
        ours, theirs = connected_sockets()
        credentials = job.credentials(host_name(name))
        stream = TlsStream(theirs, client_context(credentials), is_server=False)

        def run(stream: TlsStream = stream, agent: Agent = agent, credentials: Credentials = credentials) -> None:
            stream.shake_hands()
            with closing(Connection(stream, BYTES)) as connection:
                agent(connection, credentials)

        threading.Thread(target=run, daemon=True).start()
        found.streams[name] = TlsStream(ours, context, is_server=True)
        found.streams[name].shake_hands()
    return found


def checked(monkeypatch: pytest.MonkeyPatch, folder: Path, **agents: Agent) -> CheckedCluster:
    found = gathered(agents)

    def gather(*_given: object, partly: bool) -> Gathering:
        assert partly
        return found

    monkeypatch.setattr(cluster_check, "gather", gather)
    return check_cluster("here", found.shares, ClusterSettings(LauncherName.CONNECT, LOCAL), folder, print)


def test_every_host_is_measured_with_every_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = checked(monkeypatch, tmp_path, a=well, b=well)
    names = {"here", "a", "b"}
    assert found.problems == {}
    assert found.names == ["here", "a", "b"]
    assert found.facts.keys() == found.states.keys() == names
    assert {state.folder for state in found.states.values()} == {FolderState.SHARED}
    assert found.links.keys() == {(one, other) for one in names for other in names if one != other}
    assert not any(link.error for link in found.links.values())
    assert not list(tmp_path.iterdir())


def test_hosts_that_fail_do_not_keep_others_from_being_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    agents = {"a": ends, "b": well, "c": lies, "d": is_older, "e": greets_otherwise}
    found = checked(monkeypatch, tmp_path, **agents)
    assert {name: problem.message for name, problem in found.problems.items()} == {
        "a": "the agent of host `a` has ended without an answer",
        "c": "host `c` could not be asked: a state that cannot be read, perhaps of another version of moaic",
        "e": "host `e` could not be asked: a greeting that cannot be read, perhaps of another version of moaic",
    }
    assert found.facts["d"].version == 1
    assert found.states.keys() == {"here", "b"}
    assert found.links.keys() == {("here", "b"), ("b", "here")}
    assert not any(link.error for link in found.links.values())


def test_silent_hosts_are_waited_for_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cluster_check, "ANSWER_SECONDS", 3.0)
    begin = time.monotonic()
    found = checked(monkeypatch, tmp_path, a=is_silent, b=is_silent, c=well, d=is_silent)
    assert time.monotonic() - begin < 6
    assert found.problems.keys() == {"a", "b", "d"}
    assert all("has not answered" in each.message and each.hint for each in found.problems.values())
    assert found.links.keys() == {("here", "c"), ("c", "here")}
