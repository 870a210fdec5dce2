"""How an agent joins a job: once with the token of its host, and from then on with a certificate of the job.

The controller listens on one port. A stranger may send one small request there, for a certificate:

    agent                                                        controller
      TLS 1.3, no certificate  ------------------------------->
      [host, request, HMAC(token, host, request, controller)]  -->  checks and spends the token
      <--  [certificate, authority, HMAC(token, request, controller, certificate)]
      TLS 1.3, with this certificate  ------------------------>  the connection of the host

Both HMACs cover the certificate that the agent saw in TLS, so no one in the middle can pass them on. All who are
refused see the same, a reset of their connection; the user of the controller alone is told the reason.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.launch.identity import (
    CONTROLLER,
    Authority,
    Credentials,
    client_context,
    host_name,
    peer_name,
    request_certificate,
    server_context,
)
from moaic.runtime.launch.time_limit import cut_after, shut
from moaic.runtime.protocol.frames import BYTES, Closed, Connection
from moaic.runtime.protocol.limits import Limits, Refused
from moaic.runtime.protocol.tls import TlsStream, tune
from moaic.text.printable import printable

TOKEN_SECONDS: Final = 600
"""How long a token is valid."""

PENDING_SECONDS: Final = 5
"""How long a connection may take, in all, until it has shown who it is."""

MOST_PENDING: Final = 64
"""Connections that have not shown yet who they are, beside one for each host: all of a job may come at once."""

NAME_CHARACTERS: Final = 64
"""Shown of a name that a stranger gives; those of hosts are shorter."""

STRANGER: Final = Limits(body_bytes=4096, blocks=0, depth=4, values=64)
"""What an end may send before the other knows who it is."""

Address = tuple[str, int]


def new_token() -> str:
    """The secret of one host, for its first connection: 256 bits."""
    return secrets.token_hex(32)


def token_of(secret: str, host: str) -> str:
    """The token of one host, where several are given the same secret."""
    return hmac.new(secret.encode(), b"host\0" + host.encode(), hashlib.sha256).hexdigest()


def agent_proof(token: str, host: str, csr: bytes, fingerprint: bytes) -> bytes:
    """That the agent knows the token, for this request and this certificate of the controller."""
    return _hmac(token, b"agent\0" + host.encode() + b"\0" + _sha256(csr) + fingerprint)


def controller_proof(token: str, csr: bytes, fingerprint: bytes, certificate: bytes) -> bytes:
    """That the controller knows the token, for this answer to the request."""
    return _hmac(token, b"controller\0" + _sha256(csr) + fingerprint + _sha256(certificate))


class Tokens:
    """The tokens of the hosts of a job, each valid once and for `TOKEN_SECONDS`."""

    def __init__(self, tokens: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._tokens = dict(tokens)
        self._clock = clock
        self._end = clock() + TOKEN_SECONDS
        self._spent: set[str] = set()
        self._lock = threading.Lock()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(self._tokens)

    def spend(self, host: str, csr: bytes, fingerprint: bytes, proof: bytes) -> str | None:
        """Use the token of a host up; otherwise, why not. A wrong proof uses nothing up."""
        token = self._tokens.get(host)
        if token is None:
            return f"there is no host `{printable(host, NAME_CHARACTERS)}` in this job"
        if not hmac.compare_digest(proof, agent_proof(token, host, csr, fingerprint)):
            return f"its proof does not fit the token of host `{host}`"
        with self._lock:
            if host in self._spent:
                return "its token was used before"
            if self._clock() > self._end:
                return f"its token is older than {TOKEN_SECONDS // 60} minutes"
            self._spent.add(host)
        return None

    def prove(self, host: str, csr: bytes, fingerprint: bytes, certificate: bytes) -> bytes:
        """The controller's proof to a host of the job."""
        return controller_proof(self._tokens[host], csr, fingerprint, certificate)


def enrol(address: Address, host: str, token: str, seconds: float) -> Credentials:
    """Get a host its certificate, for the token that the controller made for it. Takes at most `seconds`."""
    name = host_name(host)
    key, csr = request_certificate()
    refused = (
        f"the controller at {_shown(address)} refused this host: its token may be used, older than "
        f"{TOKEN_SECONDS // 60} minutes, or of another job; `moaic` there says which"
    )
    with _talk(address, client_context(None), seconds, refused) as stream, closing(stream):
        fingerprint = _fingerprint(stream)
        connection = _connection(stream)
        connection.send([host, csr, agent_proof(token, host, csr, fingerprint)])
        match connection.receive().body:
            case [bytes(certificate), bytes(authority), bytes(proof)]:
                expected = controller_proof(token, csr, fingerprint, certificate)
            case _:
                raise Refused("an answer of another form")
    if not hmac.compare_digest(proof, expected):
        raise Diagnostic(
            f"the controller at {_shown(address)} could not prove that it knows the token of host `{host}`",
            hint="compare the address and the token with those that the controller shows; "
            "if they are right, something between the hosts answers in its place",
        )
    return Credentials(name, certificate, key, authority)


def dial(address: Address, credentials: Credentials, seconds: float) -> TlsStream:
    """Connect to the controller of the job, in at most `seconds`.

    The controller may still refuse this end, by closing the stream.
    """
    refused = f"the controller at {_shown(address)} refused the connection of `{credentials.name}`"
    with _talk(address, client_context(credentials), seconds, refused) as stream:
        if (name := peer_name(stream)) != CONTROLLER:
            raise Diagnostic(f"what answers at {_shown(address)} is `{name}` of this job, not its controller")
    return stream


class Listener:
    """The controller's port: enrols hosts, and hands over the streams of those that have a certificate.

    `arrived` gets a host and its stream, `refused` an address and the reason; on threads of the listener.
    """

    def __init__(
        self,
        address: str,
        port: int,
        authority: Authority,
        tokens: Tokens,
        arrived: Callable[[str, TlsStream], None],
        refused: Callable[[str, str], None],
        *,
        seconds: float = PENDING_SECONDS,
    ) -> None:
        self._hosts = {host_name(host): host for host in tokens.hosts}
        self._authority, self._tokens = authority, tokens
        self._on_arrived, self._on_refused = arrived, refused
        self._seconds = seconds
        self._most_pending = MOST_PENDING + len(self._hosts)
        credentials = authority.credentials(CONTROLLER)
        self._context = server_context(credentials)
        self._fingerprint = _sha256(ssl.PEM_cert_to_DER_cert(credentials.certificate.decode()))
        self._lock = threading.Lock()
        self._pending: set[socket.socket] = set()
        self._streams: dict[str, TlsStream] = {}
        self._is_closed = False
        self._socket = _listen(address, port, self._most_pending)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="moaic listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening and cut the connections that have not shown who they are; the streams of hosts stay."""
        with self._lock:
            self._is_closed = True
            pending = list(self._pending)
        # This ends `accept` on its thread, which closing alone does not.
        for each in (self._socket, *pending):
            shut(each)
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                # No file descriptor is left for now.
                time.sleep(0.1)
                continue
            self._begin(sock, _shown(peer))

    def _begin(self, sock: socket.socket, address: str) -> None:
        with self._lock:
            fits = not self._is_closed and len(self._pending) < self._most_pending
            if fits:
                self._pending.add(sock)
        if fits:
            threading.Thread(target=self._serve, args=(sock, address), name="moaic arrival", daemon=True).start()
        else:
            self._refuse(sock, address, f"{self._most_pending} other connections have not shown yet who they are")

    def _serve(self, sock: socket.socket, address: str) -> None:
        """Hand over a host, enrol one, or refuse."""
        with cut_after(sock, self._seconds) as cut:
            try:
                host, stream = self._identify(sock)
            except (OSError, Closed, Refused) as error:
                reason = f"it did not show who it is within {self._seconds:g} s" if cut.is_set() else _reason(error)
                self._refuse(sock, address, reason)
                return
            finally:
                with self._lock:
                    self._pending.discard(sock)
        if host is None:
            sock.close()
        else:
            self._on_arrived(host, stream)

    def _identify(self, sock: socket.socket) -> tuple[str | None, TlsStream]:
        """The host at the other end; None if that had come for a certificate, which it has got."""
        tune(sock)
        stream = TlsStream(sock, self._context, is_server=True)
        stream.shake_hands()
        name = peer_name(stream)
        if name is None:
            self._enrol(stream)
            return None, stream
        host = self._hosts.get(name)
        if host is None:
            raise Refused(f"its certificate is of `{printable(name, NAME_CHARACTERS)}`, which is no host of this job")
        self._settle(host, stream)
        return host, stream

    def _enrol(self, stream: TlsStream) -> None:
        connection = _connection(stream)
        match connection.receive().body:
            case [str(host), bytes(csr), bytes(proof)]:
                reason = self._tokens.spend(host, csr, self._fingerprint, proof)
            case _:
                raise Refused("its request has another form")
        if reason:
            raise Refused(reason)
        certificate = self._authority.issue(host_name(host), csr)
        proof = self._tokens.prove(host, csr, self._fingerprint, certificate)
        connection.send([certificate, self._authority.certificate, proof])

    def _settle(self, host: str, stream: TlsStream) -> None:
        """Note the stream as that of the host, which has one at a time."""
        with self._lock:
            if self._is_closed:
                raise Closed
            present = self._streams.get(host)
            # Whoever closes a stream leaves it without a descriptor.
            if present is not None and present.fileno() >= 0:
                raise Refused(f"host `{host}` has a connection already")
            self._streams[host] = stream

    def _refuse(self, sock: socket.socket, address: str, reason: str) -> None:
        # A reset in every case: an orderly end would tell those apart who have sent more than was read.
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
        if not self._is_closed:
            self._on_refused(address, reason)


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return socket.create_server(found[0][4][:2], family=found[0][0], backlog=backlog)
    except OSError as error:
        raise Diagnostic(
            f"cannot listen at {_shown((address, port))}: {_words(error)}",
            hint="give an address of this host, and a port that no other program uses (0 takes any)",
        ) from error


@contextmanager
def _talk(address: Address, context: ssl.SSLContext, seconds: float, refused: str) -> Generator[TlsStream]:
    """A stream to the controller, to talk with it for at most `seconds`.

    What goes wrong meanwhile closes it, and is a Diagnostic: `refused` if the other end hangs up.
    """
    begin = time.monotonic()
    sock = _connect(address, seconds)
    try:
        with cut_after(sock, begin + seconds - time.monotonic()) as cut:
            try:
                stream = TlsStream(sock, context, is_server=False)
                stream.shake_hands()
                yield stream
            except (OSError, Closed, Refused) as error:
                raise _complaint(error, address, refused, seconds if cut.is_set() else None) from error
    except BaseException:
        sock.close()
        raise


def _connect(address: Address, seconds: float) -> socket.socket:
    try:
        sock = socket.create_connection(address, seconds)
    except OSError as error:
        raise Diagnostic(
            f"nobody answers at {_shown(address)}: {_words(error)}",
            hint="check that the controller runs, that this is its address and port as this host sees it, "
            "and that no firewall is between them",
        ) from error
    # Cut as a whole, not in each call.
    sock.settimeout(None)
    tune(sock)
    return sock


def _complaint(error: Exception, address: Address, refused: str, seconds: float | None) -> Diagnostic:
    """What an agent says of a talk that went wrong, or took too long: all its `seconds`."""
    other = _shown(address)
    if seconds is not None:
        return Diagnostic(f"the controller at {other} did not answer within {seconds:g} s")
    if isinstance(error, ssl.SSLCertVerificationError):
        return Diagnostic(
            f"what answers at {other} is not the controller of this job: its certificate is of another one"
        )
    if isinstance(error, Refused) or (isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError)):
        return Diagnostic(f"what answers at {other} is no controller of moaic", hint="check the address and the port")
    return Diagnostic(refused)


def _reason(error: Exception) -> str:
    """Why the listener refuses, in words about the other end."""
    if isinstance(error, Refused):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of this job: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return f"it does not speak TLS 1.3: {error.reason}"
    return "it hung up before it had shown who it is"


def _connection(stream: TlsStream) -> Connection[bytearray]:
    return Connection(stream, BYTES, limits=STRANGER)


def _fingerprint(stream: TlsStream) -> bytes:
    certificate = stream.certificate_bytes()
    assert certificate is not None, "a server of TLS shows one"
    return _sha256(certificate)


def _hmac(token: str, data: bytes) -> bytes:
    return hmac.digest(token.encode(), data, "sha256")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _shown(address: tuple[Any, ...]) -> str:
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _words(error: OSError) -> str:
    return "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
