"""Agents started by ssh, against a real server in the other host's namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.hosts import ROOT, Hosts

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ssh") is None or not Path(SSHD).exists(), reason="needs root, ssh and sshd"
)

PROGRAM = """
import torch
x = torch.arange(8.0).to("moai")
print("sum", (x * 2).sum().item())
from moaic.runtime.controller import session
print("hosts", session.accelerator().hosts)
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Hosts], dict[str, str]]]:
    """Starts a server on the second host; gives the variables with which a program's ssh trusts it."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(hosts: Hosts) -> dict[str, str]:
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)],
                check=True,
                stdin=subprocess.DEVNULL,
            )
        wrapper = tmp_path / "moaic"
        wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m moaic "$@"\n', encoding="utf-8")
        wrapper.chmod(0o755)
        address = hosts.network.address(1)
        settings = [
            *("Port=22", f"ListenAddress={address}", f"HostKey={tmp_path / 'host'}", "PidFile=none", "UsePAM=no"),
            *(f"AuthorizedKeysFile={tmp_path / 'user.pub'}", "StrictModes=no", "PermitRootLogin=prohibit-password"),
        ]
        Path("/run/sshd").mkdir(exist_ok=True)
        command = [SSHD, "-D", "-e", "-f", "/dev/null", *(word for each in settings for word in ("-o", each))]
        servers.append(subprocess.Popen(hosts.network.inside(1, command), stderr=subprocess.DEVNULL))
        # ssh reads its own configuration from the account's folder, not from HOME: a wrapper names the key.
        ssh = tmp_path / "bin/ssh"
        ssh.parent.mkdir()
        words = f"-i {tmp_path / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} {words} "$@"\n', encoding="utf-8")
        ssh.chmod(0o755)
        time.sleep(0.5)
        return {"PATH": f"{ssh.parent}:{os.environ['PATH']}", "MOAI_TOKEN": ""}

    yield start
    for server in servers:
        server.kill()
        server.wait()


def run(hosts: Hosts, variables: dict[str, str]) -> tuple[int, str]:
    file = hosts.folder / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    process = hosts.start([str(file)], **variables)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def test_an_agent_is_started_by_ssh(cluster: Cluster, serve: Callable[[Hosts], dict[str, str]], tmp_path: Path) -> None:
    hosts = cluster(1, 1)
    if not hosts.network.has_namespaces:
        pytest.skip("the server needs an address with a free port 22")
    hosts.write(launcher="ssh", command=str(tmp_path / "moaic"))
    code, out = run(hosts, serve(hosts))
    assert code == 0, out
    assert "sum 56.0" in out
    assert "hosts ('', 'node1')" in out


def test_hosts_whose_agents_ssh_starts_are_checked(
    cluster: Cluster, serve: Callable[[Hosts], dict[str, str]], tmp_path: Path
) -> None:
    hosts = cluster(1, 1)
    if not hosts.network.has_namespaces:
        pytest.skip("the server needs an address with a free port 22")
    hosts.write(launcher="ssh", command=str(tmp_path / "moaic"))
    process = hosts.start(["-m", "moaic", "cluster", "check", "--folder", "."], **serve(hosts))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "\nnode1      yes " in out


def test_what_ssh_says_is_the_error(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.write(launcher="ssh")
    code, out = run(hosts, {"MOAI_TOKEN": ""})
    assert code != 0
    assert "the agent of host `node1` could not be started by ssh: ssh: connect to host" in out
