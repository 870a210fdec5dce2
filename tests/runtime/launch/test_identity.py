"""Certificates of a job: what they say, and what an authority does not sign."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.tls import TlsStream


def common_name(name: x509.Name) -> str | bytes:
    return name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value


def names_of_both(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str | None, str | None]:
    """What the server and the client know of each other after a handshake. Raises the server's SSLError."""
    ends = socket.socketpair()
    one, other = TlsStream(ends[0], server, is_server=True), TlsStream(ends[1], client, is_server=False)
    thread = threading.Thread(target=other.shake_hands)
    thread.start()
    try:
        one.shake_hands()
        thread.join()
        return peer_name(one), peer_name(other)
    finally:
        one.close()
        thread.join()
        other.close()


def test_a_leaf_has_the_given_name_and_both_purposes() -> None:
    authority = Authority("j")
    _, csr = request_certificate()
    leaf = x509.load_pem_x509_certificate(authority.issue("host/a", csr))
    assert common_name(leaf.subject) == "host/a"
    assert common_name(leaf.issuer) == "moaic job j"
    assert leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    purposes = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    with pytest.raises(x509.ExtensionNotFound):
        leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    now = datetime.now(UTC)
    assert leaf.not_valid_before_utc <= now - timedelta(hours=23)
    assert now + timedelta(days=364) <= leaf.not_valid_after_utc <= now + timedelta(days=365)


def test_the_authority_signs_leaves_alone() -> None:
    authority = Authority("j")
    own = x509.load_pem_x509_certificate(authority.certificate)
    constraints = own.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (constraints.ca, constraints.path_length) == (True, 0)
    usage = own.extensions.get_extension_for_class(x509.KeyUsage).value
    assert (usage.key_cert_sign, usage.digital_signature) == (True, False)
    own.verify_directly_issued_by(own)
    x509.load_pem_x509_certificate(authority.credentials("host/a").certificate).verify_directly_issued_by(own)


def request(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, name: str = "") -> bytes:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else [])
    algorithm = hashes.SHA256() if isinstance(key, ec.EllipticCurvePrivateKey) else None
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, algorithm)
    return csr.public_bytes(serialization.Encoding.PEM)


def test_the_name_in_a_request_is_ignored() -> None:
    csr = request(ec.generate_private_key(ec.SECP256R1()), CONTROLLER)
    leaf = x509.load_pem_x509_certificate(Authority("j").issue("host/a", csr))
    assert common_name(leaf.subject) == "host/a"


def wrongly_signed() -> bytes:
    der = bytearray(ssl.PEM_cert_to_DER_cert(as_certificate(request_certificate()[1])))
    der[-1] ^= 1
    return ssl.DER_cert_to_PEM_cert(bytes(der)).replace("CERTIFICATE", "CERTIFICATE REQUEST").encode()


def as_certificate(csr: bytes) -> str:
    """A request under the label that `ssl` reads."""
    return csr.decode().replace("CERTIFICATE REQUEST", "CERTIFICATE").rstrip() + "\n"


def test_requests_that_are_refused() -> None:
    authority = Authority("j")
    with pytest.raises(Refused, match="wrong signature"):
        authority.issue("host/a", wrongly_signed())
    with pytest.raises(Refused, match="cannot be read"):
        authority.issue("host/a", b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n")
    with pytest.raises(Refused, match="another kind of key"):
        authority.issue("host/a", request(ed25519.Ed25519PrivateKey.generate()))
    with pytest.raises(Refused, match="another kind of key"):
        authority.issue("host/a", request(ec.generate_private_key(ec.SECP384R1())))


def test_both_ends_know_each_other() -> None:
    authority = Authority("j")
    server, client = authority.credentials(CONTROLLER), authority.credentials(host_name("a"))
    assert names_of_both(server_context(server), client_context(client)) == ("host/a", CONTROLLER)
    assert names_of_both(server_context(server, requires=True), client_context(client)) == ("host/a", CONTROLLER)
    assert names_of_both(server_context(server), client_context(None)) == (None, None)
    with pytest.raises(ssl.SSLError):
        names_of_both(server_context(server, requires=True), client_context(None))


def test_a_leaf_signs_no_other() -> None:
    authority = Authority("j")
    host = authority.credentials("host/a")
    # An authority with the key and the certificate of a host, and with the name that it has there.
    forger = Authority("j")
    forger._key = serialization.load_pem_private_key(host.key, None)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    forger._name = x509.load_pem_x509_certificate(host.certificate).subject  # pyright: ignore[reportPrivateUsage]
    forged = forger.credentials("host/b")
    chain = Credentials("host/b", forged.certificate + host.certificate, forged.key, authority.certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        names_of_both(server_context(authority.credentials(CONTROLLER)), client_context(chain))


def test_only_tls_1_3_and_no_tickets() -> None:
    credentials = Authority("j").credentials(CONTROLLER)
    for context in (server_context(credentials), client_context(credentials), client_context(None)):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.options & ssl.OP_NO_TICKET
        assert context.options & ssl.OP_NO_COMPRESSION
    assert server_context(credentials).num_tickets == 0


def test_credentials_print_no_key() -> None:
    credentials = Authority("j").credentials("host/a")
    assert "PRIVATE KEY" in credentials.key.decode()
    assert "PRIVATE KEY" not in repr(credentials)


def test_names_that_do_not_fit() -> None:
    with pytest.raises(Diagnostic, match="has a name of 60 characters, the most is 59"):
        host_name("h" * 60)
    Authority("j" * 100).credentials(host_name("h" * 59))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for function in (request_certificate, lambda: Authority("j")):
        with pytest.raises(Diagnostic, match="need the package cryptography, which is not installed"):
            function()


def test_the_modules_load_neither_the_library_nor_torch() -> None:
    program = (
        "import sys, moaic.runtime.launch.enrolment; "
        "print([each for each in ('cryptography', 'torch', 'numpy') if each in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]", found.stdout
