"""A Ray cluster for tests: a node in each host's namespace, with TLS and a token, in a folder of its own."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.cluster.hosts import ROOT, Network

PORT = 6399

STORE = 80 << 20
"""Bytes of a node's object store, which nothing here uses; Ray takes no fewer than 75 MiB."""

STARTED = "Ray runtime started"

START_SECONDS = 60


@dataclass
class RayNodes:
    """Nodes on the hosts of a network; the first is the head, on the program's host."""

    network: Network
    folder: Path
    cores: int = 1
    """That each node offers."""
    gpus: int = 2
    """That each node says it has."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])
    folders: list[str] = field(default_factory=list[str])

    def environment(self) -> dict[str, str]:
        """The variables that nodes and programs of this cluster share."""
        return {
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(self.folder / "node.crt"),
            "RAY_TLS_SERVER_KEY": str(self.folder / "node.key"),
            "RAY_TLS_CA_CERT": str(self.folder / "node.crt"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ADDRESS": f"{self.network.address(0)}:{PORT}",
        }

    def start(self) -> None:
        write_certificate(self.folder, [self.network.address(host) for host in range(self.network.count)])
        (self.folder / "token").write_text(secrets.token_hex(32), encoding="ascii")
        for host in range(self.network.count):
            self.start_node(host)

    def start_node(self, host: int) -> None:
        """Start a node, and wait until it is there."""
        head = f"{self.network.address(0)}:{PORT}"
        where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if host == 0 else [f"--address={head}"]
        # Sockets of Ray need a short path.
        folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
        self.folders.append(folder)
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block", "--disable-usage-stats"),
            *(f"--node-ip-address={self.network.address(host)}", f"--temp-dir={folder}", f"--num-cpus={self.cores}"),
            f"--num-gpus={self.gpus}",
            f"--object-store-memory={STORE}",
        ]
        environment = {**os.environ, **self.environment(), "PYTHONPATH": str(ROOT)}
        said = self.folder / f"ray{host}.txt"
        with said.open("wb") as out:
            node = subprocess.Popen(
                self.network.inside(host, command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(node)
        until = time.monotonic() + START_SECONDS
        while STARTED not in said.read_text(encoding="utf-8"):
            if node.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"node {host} has not started: {said.read_text(encoding='utf-8')}")
            time.sleep(0.1)

    def close(self) -> None:
        """End all that runs on the hosts: nodes have processes in sessions of their own."""
        for host in range(self.network.count):
            self.network.kill_all(host)
        for node in self.processes:
            node.wait(20)
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)


def write_certificate(folder: Path, addresses: list[str]) -> None:
    """A certificate for all nodes that proves itself, as `node.crt` and `node.key`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nodes")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName(
        [
            *(x509.IPAddress(ipaddress.ip_address(each)) for each in [*addresses, "127.0.0.1"]),
            x509.DNSName("localhost"),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "node.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "node.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
