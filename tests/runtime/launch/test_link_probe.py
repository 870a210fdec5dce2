"""Links that are tried before there are workers: between two ends of a job, and for everybody else not at all."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress

import pytest

from moaic.runtime.launch import link_probe
from moaic.runtime.launch.identity import Authority, client_context
from moaic.runtime.launch.link_probe import LinkProbe
from moaic.runtime.launch.listening import listen
from moaic.runtime.protocol.host_messages import MOST_CHARACTERS, HostFacts, HostState, MeasuredLink
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import PeerAddress
from moaic.runtime.protocol.tls import TlsStream

LOCAL = "127.0.0.1"

TLS_HEAD = bytes.fromhex("1603010200010001fc0303") + bytes(60)
"""How a client begins; each byte alone comes within any timeout of a call."""

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


def test_strangers_that_say_little_block_nobody(probe: Probe) -> None:
    job = Authority("j")
    one, other = probe(job, "host/a"), probe(job, "host/b")
    with ExitStack() as strangers:
        for _ in range(3):
            strangers.enter_context(socket.create_connection((LOCAL, other.port), 5)).sendall(b"\x16")
        begin = time.monotonic()
        assert one.measure(PeerAddress(LOCAL, other.port, "host/b")).error == ""
        assert time.monotonic() - begin < link_probe.DIAL_SECONDS


def test_a_handshake_has_a_limit_in_all(monkeypatch: pytest.MonkeyPatch, probe: Probe) -> None:
    monkeypatch.setattr(link_probe, "DIAL_SECONDS", 0.5)
    other = probe(Authority("j"), "host/b")
    with socket.create_connection((LOCAL, other.port), 0.1) as stranger:
        begin = time.monotonic()
        for byte in TLS_HEAD:
            stranger.sendall(bytes([byte]))
            with suppress(TimeoutError):
                assert not stranger.recv(1)
                break
        with suppress(ConnectionError):
            stranger.settimeout(5)
            assert not stranger.recv(1)
        assert time.monotonic() - begin < 3


def test_no_more_connections_than_have_a_thread(monkeypatch: pytest.MonkeyPatch, probe: Probe) -> None:
    monkeypatch.setattr(link_probe, "MOST_LINKS", 1)
    job = Authority("j")
    one, other = probe(job, "host/a"), probe(job, "host/b")
    to = PeerAddress(LOCAL, other.port, "host/b")
    with socket.create_connection((LOCAL, other.port), 5):
        assert one.measure(to).error
    until = time.monotonic() + 5
    while one.measure(to).error:
        assert time.monotonic() < until


def test_a_host_that_confirms_late_is_a_broken_link(monkeypatch: pytest.MonkeyPatch, probe: Probe) -> None:
    def late(stream: TlsStream) -> None:
        time.sleep(0.2)
        for _ in range(50):
            stream.sendmsg([memoryview(link_probe.CONFIRMED)])
            time.sleep(0.2)

    job = Authority("j")
    one, other = probe(job, "host/a"), probe(job, "host/b")
    monkeypatch.setattr(link_probe, "_confirm_all", late)
    monkeypatch.setattr(link_probe, "MEASURE_SECONDS", 1.0)
    begin = time.monotonic()
    link = one.measure(PeerAddress(LOCAL, other.port, "host/b"))
    assert link.error == "it could not be measured within 1 s"
    assert time.monotonic() - begin < 3


def test_texts_of_other_hosts_stay_within_their_lines() -> None:
    words = "\x1b[2J\nproblem  forged" + "x" * 1000
    facts = HostFacts.decoded([3, words, words, words, words, 8, words, [words]])
    state = HostState.decoded([1, [1], words, True, "shared", 0, words])
    link = MeasuredLink.decoded([0.0, 0.0, words])
    (gpu,) = facts.gpus
    ours = (facts.moaic, facts.torch, facts.python, facts.cpu, facts.triton)
    for text in (*ours, gpu, state.compiler, state.words, link.error):
        assert text.isprintable()
        assert len(text) == MOST_CHARACTERS


FACTS = [3, "0.1.0", "2.13.0", "3.11", "x86_64", 8, "3.7.0", ["NVIDIA H200"]]

STATE = [1, [2], "g++", True, "shared", 4000, ""]

LINK = [0.1, 1e6, ""]


def with_value(data: Sequence[object], index: int, value: object) -> list[object]:
    return [*data[:index], value, *data[index + 1 :]]


@pytest.mark.parametrize("data", [None, [], {}, "facts", STATE, LINK, [1, "0.0.1"], [*FACTS, 1]])
def test_greetings_of_another_form_are_refused(data: list[object]) -> None:
    with pytest.raises(Refused):
        HostFacts.decoded(data)


@pytest.mark.parametrize("data", [None, [], FACTS, [1, [], "g++", True, "shared", 1], [0.0, 1, ""]])
def test_answers_of_another_form_are_refused(data: list[object]) -> None:
    with pytest.raises(Refused):
        HostState.decoded(data)
    with pytest.raises(Refused):
        MeasuredLink.decoded(data)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        *[(0, -1), (0, 1 << 63), (5, 0), (5, -3), (5, 1 << 40), (5, True), (1, 2), (4, None)],
        *[(7, "NVIDIA H200"), (7, [1]), (7, [["NVIDIA H200"]]), (7, ["NVIDIA H200"] * 5000)],
    ],
)
def test_facts_of_no_host_are_refused(index: int, value: object) -> None:
    with pytest.raises(Refused):
        HostFacts.decoded(with_value(FACTS, index, value))


@pytest.mark.parametrize(
    ("index", "value"),
    [
        *[(0, -1), (0, 1 << 60), (1, 3), (1, [-1]), (1, [1 << 60]), (1, ["x"])],
        *[(3, 1), (4, "mine"), (5, 0), (5, -1), (5, 1 << 16), (6, "no port")],
    ],
)
def test_states_of_no_host_are_refused(index: int, value: object) -> None:
    with pytest.raises(Refused):
        HostState.decoded(with_value(STATE, index, value))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 1])
def test_measurements_of_no_link_are_refused(index: int, value: object) -> None:
    with pytest.raises(Refused):
        MeasuredLink.decoded(with_value(LINK, index, value))
