"""Links that are tried before there are workers: between two ends of a job, and for everybody else not at all."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from moaic.runtime.launch.identity import Authority, client_context
from moaic.runtime.launch.link_probe import LinkProbe
from moaic.runtime.launch.listening import listen
from moaic.runtime.protocol.host_messages import HostState, MeasuredLink
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import PeerAddress
from moaic.runtime.protocol.tls import TlsStream

LOCAL = "127.0.0.1"

Probe = Callable[[Authority, str], LinkProbe]


@pytest.fixture
def probe() -> Iterator[Probe]:
    made: list[LinkProbe] = []

    def make(authority: Authority, name: str) -> LinkProbe:
        made.append(LinkProbe(listen(LOCAL, 1)[0], authority.credentials(name)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_two_hosts_of_a_job_measure_each_other(probe: Probe) -> None:
    job = Authority("j")
    one, other = probe(job, "host/a"), probe(job, "host/b")
    for _ in range(2):
        link = one.measure(PeerAddress(LOCAL, other.port, "host/b"))
        assert link.error == ""
        assert 0 < link.round_trip < 1
        assert link.rate > 1e6


def test_another_host_than_expected_is_an_error(probe: Probe) -> None:
    job = Authority("j")
    link = probe(job, "host/a").measure(PeerAddress(LOCAL, probe(job, "host/b").port, "host/c"))
    assert link == MeasuredLink(0.0, 0.0, "another host answers there: host/b")


def test_a_host_of_another_job_is_an_error_on_both_sides(probe: Probe) -> None:
    link = probe(Authority("j"), "host/a").measure(PeerAddress(LOCAL, probe(Authority("k"), "host/b").port, "host/b"))
    assert link.error


def test_a_port_that_nobody_listens_at_is_an_error(probe: Probe) -> None:
    job = Authority("j")
    gone = probe(job, "host/b")
    gone.close()
    assert probe(job, "host/a").measure(PeerAddress(LOCAL, gone.port, "host/b")).error == "Connection refused"


def test_strangers_get_no_answer_and_stop_nobody(probe: Probe) -> None:
    job = Authority("j")
    one, other = probe(job, "host/a"), probe(job, "host/b")
    stranger = TlsStream(socket.create_connection((LOCAL, other.port), 5), client_context(None), is_server=False)
    stranger.shake_hands()
    with suppress(OSError):
        assert stranger.recvmsg_into([memoryview(bytearray(1))])[0] == 0
    stranger.close()
    assert one.measure(PeerAddress(LOCAL, other.port, "host/b")).error == ""


@pytest.mark.parametrize(
    "data", [None, [], [1, "g++", True, "shared", 1], [1, "g++", True, "mine", 1, ""], [0.0, 1, ""]]
)
def test_answers_that_cannot_be_read_are_refused(data: list[object]) -> None:
    with pytest.raises(Refused):
        HostState.decoded(data)
    with pytest.raises(Refused):
        MeasuredLink.decoded(data)
