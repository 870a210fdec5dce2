"""Who is who in a job on several hosts: an authority of the job alone, and the certificates that it signs.

The authority lives in the memory of the controller and ends with it, so a certificate is good for one job.
`cryptography` is imported inside functions: jobs on one host need none.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.tls import TlsStream

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
    from cryptography.x509 import CertificateBuilder, Name

CONTROLLER: Final = "controller"
"""The name in the controller's certificate."""

MOST_CHARACTERS: Final = 64
"""Of the common name of a certificate (RFC 5280, ub-common-name)."""


def host_name(host: str) -> str:
    """The name in the certificate of a host's agent."""
    name = f"host/{host}"
    if len(name) > MOST_CHARACTERS:
        most = MOST_CHARACTERS - len("host/")
        raise Diagnostic(f"host `{host}` has a name of {len(host)} characters, the most is {most}")
    return name


@dataclass(frozen=True, slots=True)
class Credentials:
    """What one end needs to prove its name and to check the other's, in PEM."""

    name: str
    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes


class Authority:
    """Signs the certificates of one job."""

    def __init__(self, job: str) -> None:
        _need_cryptography()
        from cryptography import x509

        self._name = _named(f"moaic job {job}"[:MOST_CHARACTERS])
        self._key = _new_key()
        builder = _certificate(self._name, self._name, self._key.public_key(), self._key)
        # Path length 0: what it signs signs nothing.
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        self.certificate = _signed(builder, self._key)

    def issue(self, name: str, csr_pem: bytes) -> bytes:
        """The certificate of `name` for the key of a request. Raises Refused for a request that proves no such key."""
        return self._issue(name, _requested_key(csr_pem))

    def credentials(self, name: str) -> Credentials:
        """A new key and its certificate, for an end of this process."""
        key = _new_key()
        return Credentials(name, self._issue(name, key.public_key()), _key_pem(key), self.certificate)

    def _issue(self, name: str, key: EllipticCurvePublicKey) -> bytes:
        from cryptography import x509
        from cryptography.x509.oid import ExtendedKeyUsageOID

        builder = _certificate(_named(name), self._name, key, self._key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return _signed(builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False), self._key)


def request_certificate() -> tuple[bytes, bytes]:
    """A new key, which stays here, and the request for its certificate, in PEM."""
    _need_cryptography()
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    key = _new_key()
    # The subject is empty, as the authority sets the name.
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return _key_pem(key), request.public_bytes(serialization.Encoding.PEM)


def server_context(credentials: Credentials, *, requires: bool = False) -> ssl.SSLContext:
    """TLS of a listening end; with `requires`, only those with a certificate of the job come in."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    context.num_tickets = 0
    context.verify_mode = ssl.CERT_REQUIRED if requires else ssl.CERT_OPTIONAL
    return context


def client_context(credentials: Credentials | None) -> ssl.SSLContext:
    """TLS of a dialing end; without credentials it checks no certificate: the token proves the controller instead."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, credentials)
    context.verify_mode = ssl.CERT_REQUIRED if credentials else ssl.CERT_NONE
    return context


def peer_name(stream: TlsStream) -> str | None:
    """The name in the verified certificate of the other end; None if it has shown none."""
    certificate = stream.certificate()
    subject: Sequence[Sequence[tuple[str, str]]] = certificate["subject"] if certificate else ()
    return next((value for part in subject for key, value in part if key == "commonName"), None)


def _context(protocol: int, credentials: Credentials | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
    # Hosts have many names and addresses: the certificate's own name is compared instead.
    context.check_hostname = False
    if credentials:
        context.load_verify_locations(cadata=credentials.authority.decode())
        _load(context, credentials)
    return context


def _load(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Give the context its certificate and key, which `ssl` reads from files only: from one in memory, with no name."""
    file = os.memfd_create("credentials")
    try:
        path = Path(f"/proc/self/fd/{file}")
        path.write_bytes(credentials.key + credentials.certificate)
        context.load_cert_chain(path)
    finally:
        os.close(file)


def _need_cryptography() -> None:
    if find_spec("cryptography") is None:
        raise Diagnostic(
            "hosts of a cluster need the package cryptography, which is not installed",
            hint="pip install 'moaic[cluster]'",
        )


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _requested_key(csr_pem: bytes) -> EllipticCurvePublicKey:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        request = x509.load_pem_x509_csr(csr_pem)
        key, fits = request.public_key(), request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise Refused("its request for a certificate cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Refused("its request for a certificate is for another kind of key than P-256")
    if not fits:
        raise Refused("its request for a certificate has a wrong signature")
    return key


def _named(name: str) -> Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    subject: Name, issuer: Name, key: EllipticCurvePublicKey, signer: EllipticCurvePrivateKey
) -> CertificateBuilder:
    """What all certificates have in common."""
    from cryptography import x509

    now = datetime.now(UTC)
    signing = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # The clocks of hosts differ, by a wrong time zone at the worst. No job lasts a year, nor does its authority.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=365))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(signing, critical=False)
    )


def _usage(*, signs_certificates: bool) -> Any:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: CertificateBuilder, key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
