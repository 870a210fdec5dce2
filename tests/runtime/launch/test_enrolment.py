"""Joining a job: the happy way, and every stranger that a real listener on this host refuses."""

from __future__ import annotations

import hashlib
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.launch.enrolment import (
    MOST_PENDING,
    PENDING_SECONDS,
    TOKEN_SECONDS,
    Listener,
    Tokens,
    agent_proof,
    dial,
    enrol,
    new_token,
)
from moaic.runtime.launch.identity import (
    CONTROLLER,
    Authority,
    Credentials,
    client_context,
    request_certificate,
    server_context,
)
from moaic.runtime.protocol.frames import BlockMemory, Closed, Connection, encode, frame, readable
from moaic.runtime.protocol.limits import LIMITS, Limits
from moaic.runtime.protocol.tls import TlsStream

LOCAL = "127.0.0.1"

SECONDS = 0.3
"""For which a hasty listener waits for a stranger; others wait as long as users' do."""


def ignore(_one: object, _other: object) -> None:
    """The callback of a listener that nothing reaches."""


class Job:
    """A listener for the hosts `a` and `b`, and what it has told."""

    def __init__(self, *, seconds: float = PENDING_SECONDS) -> None:
        self.authority = Authority("j")
        self.tokens = {"a": new_token(), "b": new_token()}
        self.now = 0.0
        self.arrived: queue.Queue[tuple[str, TlsStream]] = queue.Queue()
        self.refusals: queue.Queue[tuple[str, str]] = queue.Queue()
        tokens = Tokens(self.tokens, lambda: self.now)
        self.listener = Listener(LOCAL, 0, self.authority, tokens, self._arrive, self._refuse, seconds=seconds)
        self.address = (LOCAL, self.listener.port)
        self.streams: list[TlsStream] = []

    def _arrive(self, host: str, stream: TlsStream) -> None:
        self.streams.append(stream)
        self.arrived.put((host, stream))

    def _refuse(self, address: str, reason: str) -> None:
        self.refusals.put((address, reason))

    def refusal(self) -> str:
        return self.refusals.get(timeout=5)[1]

    def next_host(self) -> str:
        return self.arrived.get(timeout=5)[0]

    def is_untouched(self) -> bool:
        return self.arrived.empty() and self.refusals.empty()

    def close(self) -> None:
        self.listener.close()
        for stream in self.streams:
            stream.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


@pytest.fixture
def hasty() -> Iterator[Job]:
    made = Job(seconds=SECONDS)
    yield made
    made.close()


def connected(stream: TlsStream, limits: Limits = LIMITS) -> Connection[bytearray]:
    return Connection(stream, BlockMemory(bytearray, memoryview), limits=limits)


def stranger(address: tuple[str, int], context: ssl.SSLContext | None = None) -> TlsStream:
    """TLS with a listener; without a certificate, if no context says otherwise."""
    stream = TlsStream(socket.create_connection(address, 5), context or client_context(None), is_server=False)
    stream.shake_hands()
    return stream


def fingerprint(stream: TlsStream) -> bytes:
    return hashlib.sha256(stream.certificate_bytes() or b"").digest()


def below(stream: TlsStream) -> socket.socket:
    return stream._socket  # pyright: ignore[reportPrivateUsage]


def see_reset(stream: TlsStream | socket.socket) -> bool:
    """Whether the other end answers with nothing but a reset."""
    sock = below(stream) if isinstance(stream, TlsStream) else stream
    sock.settimeout(5)
    try:
        return sock.recv(1) == b"not even an end"
    except ConnectionResetError:
        return True
    finally:
        sock.close()


def test_a_host_enrols_and_talks() -> None:
    job = Job(seconds=1)
    credentials = enrol(job.address, "a", job.tokens["a"], 5)
    assert credentials.name == "host/a"
    assert credentials.authority == job.authority.certificate
    mine = connected(dial(job.address, credentials, 5))
    host, stream = job.arrived.get(timeout=5)
    theirs = connected(stream)
    assert host == "a"
    # More than a stranger may say, and longer than one may wait.
    time.sleep(1.1)
    for one, other in ((mine, theirs), (theirs, mine)):
        one.send(["hello", b"x" * 10_000])
        assert other.receive().body == ["hello", b"x" * 10_000]
    mine.close()
    assert job.refusals.empty()
    job.close()


def test_the_first_message_may_come_right_behind_the_handshake(job: Job) -> None:
    credentials = job.authority.credentials("host/a")
    for _ in range(20):
        mine = connected(dial(job.address, credentials, 5))
        mine.send("first")
        _, stream = job.arrived.get(timeout=5)
        # A loop of events reads only from what a poll shows.
        theirs = connected(stream)
        assert readable([theirs], 5), "the message stays hidden in the TLS of this end"
        assert theirs.receive().body == "first"
        mine.close()
        theirs.close()


def test_a_host_comes_back_once_its_stream_is_closed(job: Job) -> None:
    credentials = job.authority.credentials("host/a")
    first = dial(job.address, credentials, 5)
    host, stream = job.arrived.get(timeout=5)
    second = dial(job.address, credentials, 5)
    assert job.refusal() == "host `a` has a connection already"
    assert see_reset(second)
    stream.close()
    third = dial(job.address, credentials, 5)
    assert (host, job.next_host()) == ("a", "a")
    first.close()
    third.close()


def test_plain_bytes(job: Job) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 10_000, b"moai" * 2000, b"\x16\x03\x01\xff\xff" * 2000):
        with socket.create_connection(job.address) as sock:
            with suppress(OSError):
                sock.sendall(garbage)
            assert see_reset(sock)
        assert job.refusal().startswith("it does not speak TLS 1.3: ")


@pytest.mark.parametrize("start", [b"", b"\x16\x03\x01\x20\x00"], ids=["silence", "drip"])
def test_a_slow_stranger_is_cut(hasty: Job, start: bytes) -> None:
    """Even one who sends a byte of a long record now and then."""
    begin = time.monotonic()
    with socket.create_connection(hasty.address) as sock:
        sock.sendall(start)
        while hasty.refusals.empty() and time.monotonic() < begin + 5:
            with suppress(OSError):
                sock.sendall(start[:1])
            time.sleep(0.02)
    assert hasty.refusal() == "it did not show who it is within 0.3 s"
    assert SECONDS <= time.monotonic() - begin < SECONDS + 3


def test_a_slow_request_is_cut(hasty: Job) -> None:
    stream = stranger(hasty.address)
    stream.sendmsg([memoryview(b"moai")])
    assert hasty.refusal() == "it did not show who it is within 0.3 s"
    assert see_reset(stream)


def test_a_stranger_who_hangs_up(job: Job) -> None:
    socket.create_connection(job.address).close()
    assert job.refusal() == "it hung up before it had shown who it is"
    stranger(job.address).close()
    assert job.refusal() == "it hung up before it had shown who it is"


def test_a_token_used_twice(job: Job) -> None:
    enrol(job.address, "a", job.tokens["a"], 5)
    with pytest.raises(
        Diagnostic, match=r"refused this host: its token may be used, older than 10 minutes, or of another"
    ):
        enrol(job.address, "a", job.tokens["a"], 5)
    assert job.refusal() == "its token was used before"


def test_an_old_token(job: Job) -> None:
    job.now = TOKEN_SECONDS - 1
    enrol(job.address, "a", job.tokens["a"], 5)
    job.now = TOKEN_SECONDS + 1
    with pytest.raises(Diagnostic, match="refused this host"):
        enrol(job.address, "b", job.tokens["b"], 5)
    assert job.refusal() == "its token is older than 10 minutes"


def test_a_wrong_token_uses_none_up(job: Job) -> None:
    for wrong in (new_token(), "", job.tokens["b"]):
        with pytest.raises(Diagnostic, match="refused this host"):
            enrol(job.address, "a", wrong, 5)
        assert job.refusal() == "its proof does not fit the token of host `a`"
    enrol(job.address, "a", job.tokens["a"], 5)


def test_a_host_of_no_job(job: Job) -> None:
    with pytest.raises(Diagnostic, match="refused this host"):
        enrol(job.address, "c\n", job.tokens["a"], 5)
    assert job.refusal() == "there is no host `c?` in this job"


def test_one_token_enrols_once_from_many_threads() -> None:
    job = Job()
    results: list[Credentials | Diagnostic] = []

    def attempt() -> None:
        try:
            results.append(enrol(job.address, "a", job.tokens["a"], 5))
        except Diagnostic as error:
            results.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.close()
    assert sorted(type(each).__name__ for each in results) == ["Credentials", *["Diagnostic"] * 7]


def test_a_certificate_of_another_job(job: Job) -> None:
    other = Authority("other").credentials("host/a")
    mixed = Credentials(other.name, other.certificate, other.key, job.authority.certificate)
    stream = dial(job.address, mixed, 5)
    assert job.refusal().startswith("its certificate is not of this job: ")
    assert see_reset(stream)
    with pytest.raises(Diagnostic, match="is not the controller of this job"):
        dial(job.address, other, 5)
    assert job.refusal().startswith(("it does not speak", "it hung up"))
    assert job.arrived.empty()


@pytest.mark.parametrize("name", ["host/c", CONTROLLER, "a", "host/"])
def test_a_certificate_of_no_host(job: Job, name: str) -> None:
    stream = dial(job.address, job.authority.credentials(name), 5)
    assert job.refusal() == f"its certificate is of `{name}`, which is no host of this job"
    assert see_reset(stream)
    assert job.arrived.empty()


def test_the_certificate_names_the_host_whatever_is_sent(job: Job) -> None:
    stream = dial(job.address, job.authority.credentials("host/a"), 5)
    _, csr = request_certificate()
    connection = connected(stream)
    connection.send(["b", csr, agent_proof(job.tokens["b"], "b", csr, fingerprint(stream))])
    assert job.next_host() == "a"
    assert job.is_untouched()
    connection.close()
    # Its token was not spent either.
    enrol(job.address, "b", job.tokens["b"], 5)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"x" * 4097, "a body of 4,100 bytes, the most is 4,096"),
        ([0] * 65, "its request has another form"),
        ([[[[[0]]]]], "a body of lists more than 4 deep"),
        (["a", b"csr"], "its request has another form"),
        ([b"a", b"csr", b"proof"], "its request has another form"),
        ({"host": "a"}, "its request has another form"),
        (["a", b"csr", b"proof"], "its proof does not fit the token of host `a`"),
    ],
)
def test_strange_requests(job: Job, body: Any, reason: str) -> None:
    stream = stranger(job.address)
    stream.sendmsg(frame(encode(body)))
    assert job.refusal() == reason
    assert see_reset(stream)
    assert job.arrived.empty()


def test_blocks_before_identity(job: Job) -> None:
    stream = stranger(job.address)
    stream.sendmsg(frame(encode(None), [memoryview(b"block")]))
    assert job.refusal() == "1 blocks, the most is 0"
    assert see_reset(stream)


def test_a_request_for_another_key(job: Job) -> None:
    stream = stranger(job.address)
    csr = b"no request"
    stream.sendmsg(frame(encode(["a", csr, agent_proof(job.tokens["a"], "a", csr, fingerprint(stream))])))
    assert job.refusal() == "its request for a certificate cannot be read"
    assert see_reset(stream)


def test_tls_1_2(job: Job) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(job.address, 5) as sock, pytest.raises(ConnectionResetError):
        TlsStream(sock, context, is_server=False).shake_hands()
    assert job.refusal() == "it does not speak TLS 1.3: UNSUPPORTED_PROTOCOL"


def test_too_many_at_once() -> None:
    job = Job()
    pending = [socket.create_connection(job.address) for _ in range(MOST_PENDING + len(job.tokens))]
    with socket.create_connection(job.address) as one_more:
        assert job.refusal() == "66 other connections have not shown yet who they are"
        assert see_reset(one_more)
    for each in pending:
        each.close()
    for _ in pending:
        assert job.refusal() == "it hung up before it had shown who it is"
    enrol(job.address, "a", job.tokens["a"], 5)
    job.close()


def test_closing_cuts_strangers_and_keeps_hosts() -> None:
    job = Job()
    mine = connected(dial(job.address, job.authority.credentials("host/a"), 5))
    _, stream = job.arrived.get(timeout=5)
    with socket.create_connection(job.address) as waiting, below(stranger(job.address)) as greeted:
        time.sleep(0.05)
        job.listener.close()
        for each in (waiting, greeted):
            each.settimeout(5)
            with suppress(ConnectionResetError):
                assert each.recv(1) == b""
    with pytest.raises(Diagnostic, match="nobody answers"):
        dial(job.address, job.authority.credentials("host/b"), 5)
    connected(stream).send("still here")
    assert mine.receive().body == "still here"
    assert job.refusals.empty()
    mine.close()
    job.close()


class FalseController:
    """Answers one agent in the place of the controller, and keeps what it was sent."""

    def __init__(self, answer: Callable[[list[Any]], Any], credentials: Credentials | None = None) -> None:
        self.seen: list[Any] = []
        self._answer = answer
        self._context = server_context(credentials or Authority("false").credentials(CONTROLLER))
        self._socket = socket.create_server((LOCAL, 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._socket.accept()
        stream = TlsStream(sock, self._context, is_server=True)
        with suppress(OSError, Closed):
            stream.shake_hands()
            connection = connected(stream)
            self.seen.append(connection.receive().body)
            connection.send(self._answer(self.seen[0]))
        stream.close()

    def close(self) -> None:
        self._thread.join()
        self._socket.close()


def test_a_false_controller_is_found_out_and_learns_nothing(job: Job) -> None:
    authority = Authority("false")
    false = FalseController(lambda sent: [authority.issue("host/a", sent[1]), authority.certificate, b"\0" * 32])
    with pytest.raises(Diagnostic, match="could not prove that it knows the token of host `a`"):
        enrol(false.address, "a", job.tokens["a"], 5)
    false.close()
    # It sends the true controller what the agent sent: the proof is of another certificate.
    stream = stranger(job.address)
    stream.sendmsg(frame(encode(false.seen[0])))
    assert job.refusal() == "its proof does not fit the token of host `a`"
    assert see_reset(stream)
    enrol(job.address, "a", job.tokens["a"], 5)


def test_the_controllers_proof_is_for_one_certificate(job: Job) -> None:
    """Who is in the middle has no other certificate accepted, even with a proof of the controller for this agent."""
    false = FalseController(lambda sent: [b"forged", b"forged", sent[2]])
    with pytest.raises(Diagnostic, match="could not prove"):
        enrol(false.address, "a", job.tokens["a"], 5)
    false.close()


@pytest.mark.parametrize("answer", [None, [b"1", b"2"], ["1", "2", "3"], b"x" * 5000])
def test_answers_of_no_controller(answer: Any) -> None:
    false = FalseController(lambda _: answer)
    with pytest.raises(Diagnostic, match="is no controller of moaic"):
        enrol(false.address, "a", new_token(), 5)
    false.close()


def test_a_host_of_the_job_is_not_its_controller(job: Job) -> None:
    false = FalseController(lambda _: None, job.authority.credentials("host/b"))
    with pytest.raises(Diagnostic, match=r"is `host/b` of this job, not its controller"):
        dial(false.address, job.authority.credentials("host/a"), 5)
    false.close()


def test_nobody_answers() -> None:
    with socket.create_server((LOCAL, 0)) as server:
        address: tuple[str, int] = server.getsockname()
    with pytest.raises(Diagnostic, match=r"nobody answers at 127.0.0.1:\d+: connection refused") as caught:
        enrol(address, "a", new_token(), 5)
    assert "firewall" in caught.value.hint


def test_a_controller_that_says_nothing() -> None:
    with socket.create_server((LOCAL, 0)) as server:
        with pytest.raises(Diagnostic, match=r"did not answer within 0.2 s"):
            enrol(server.getsockname(), "a", new_token(), 0.2)
        with pytest.raises(Diagnostic, match=r"did not answer within 0.2 s"):
            dial(server.getsockname(), Authority("j").credentials("host/a"), 0.2)


def test_a_port_that_is_taken(job: Job) -> None:
    tokens = Tokens({})
    with pytest.raises(Diagnostic, match=r"cannot listen at 127.0.0.1:\d+: address already in use"):
        Listener(LOCAL, job.listener.port, job.authority, tokens, ignore, ignore)
    with pytest.raises(Diagnostic, match=r"cannot listen at 192.0.2.1:0: cannot assign"):
        Listener("192.0.2.1", 0, job.authority, tokens, ignore, ignore)


def test_host_names_are_compared_before_the_listener_starts() -> None:
    with pytest.raises(Diagnostic, match="the most is 59"):
        Listener(LOCAL, 0, Authority("j"), Tokens({"h" * 60: "t"}), ignore, ignore)


def test_tokens_are_long_and_differ() -> None:
    assert len({new_token() for _ in range(100)}) == 100
    assert len(bytes.fromhex(new_token())) == 32
