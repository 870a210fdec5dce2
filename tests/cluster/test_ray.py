"""Agents started by Ray, against real nodes with TLS and a token in two namespaces."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.conftest import has_namespaces
from tests.cluster.hosts import Hosts, Network
from tests.cluster.ray_nodes import RayNodes

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not has_namespaces(), reason="needs network namespaces")

PROGRAM = """
import sys
import torch
x = torch.arange(8.0).to("moai")
print("sum", (x * 2).sum().item())
from moaic.runtime.controller import session
print("hosts", session.accelerator().hosts, flush=True)
if sys.argv[1:]:
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    network = Network((os.getpid() + 50_000) % 100_000, 2, True)
    network.make()
    nodes = RayNodes(network, tmp_path_factory.mktemp("ray"))
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()
        network.remove()


@pytest.fixture
def hosts(nodes: RayNodes, tmp_path: Path) -> Hosts:
    hosts = Hosts(nodes.network, [1, 1], tmp_path)
    hosts.write(launcher="ray", port=0)
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    return hosts


def run(hosts: Hosts, variables: dict[str, str]) -> tuple[int, str]:
    process = hosts.start([str(hosts.folder / "program.py")], MOAI_TOKEN="", **variables)
    out, _ = process.communicate(timeout=90)
    return process.returncode, out


def processes_of(hosts: Hosts) -> list[str]:
    """Command lines with a part of moaic, on both hosts."""
    found: list[str] = []
    for host in range(2):
        for pid in hosts.network.processes(host):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            found += [line] if "moaic" in line else []
    return found


def check_nothing_left(hosts: Hosts) -> None:
    until = time.monotonic() + 10
    while found := processes_of(hosts):
        assert time.monotonic() < until, found
        time.sleep(0.1)


def test_a_host_without_an_address_is_any_other_node(nodes: RayNodes, hosts: Hosts) -> None:
    file = hosts.folder / "config/moai/cluster.toml"
    lines = file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(line for line in lines if not line.startswith(("address", "listen"))), encoding="utf-8")
    code, out = run(hosts, nodes.environment())
    assert code == 0, out
    assert "sum 56.0" in out
    assert "hosts ('', 'node1')" in out
    check_nothing_left(hosts)


def test_nothing_is_left_of_a_program_that_is_killed(nodes: RayNodes, hosts: Hosts) -> None:
    program = hosts.start([str(hosts.folder / "program.py"), "stay"], MOAI_TOKEN="", **nodes.environment())
    assert program.stdout is not None
    while "hosts" not in (line := program.stdout.readline()):
        assert line, "it has ended"
    program.send_signal(signal.SIGKILL)
    program.communicate()
    check_nothing_left(hosts)


def test_more_than_the_nodes_have(nodes: RayNodes, hosts: Hosts) -> None:
    hosts = replace(hosts, workers=[1, 3])
    hosts.write(launcher="ray", port=0, wait=3)
    code, out = run(hosts, nodes.environment())
    address = hosts.network.address
    assert code != 0
    assert "error: Ray: no free nodes, apart from this one, for `node1` (3 CPUs). Ray has " in out
    assert f"{address(0)} (1 CPU, 2 GPUs)" in out
    assert f"{address(1)} (1 CPU, 2 GPUs)" in out
    check_nothing_left(hosts)


AGENT_WITH_GPUS = """
import os, time
from moaic.runtime.host.cluster_settings import ClusterSettings, LauncherName
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.launchers.launcher import Invitation
from moaic.runtime.launch.launchers.ray import Ray
command = "/bin/sh -c 'echo visible: $CUDA_VISIBLE_DEVICES >&2; exit 3'"
ray = Ray(ClusterSettings(LauncherName.RAY, command=command), os.environ, print)
try:
    shares = ray.place([HostShare("node1", "node1", 1, 2)], 20)
    ray.start(shares, Invitation(("10.0.0.1", 1), ray.secrets(["node1"])))
    while not (failed := ray.failed()):
        time.sleep(0.05)
    print(failed["node1"])
finally:
    ray.end(1)
"""


def test_an_agent_sees_the_gpus_that_its_workers_need(nodes: RayNodes, hosts: Hosts) -> None:
    program = hosts.folder / "gpus.py"
    program.write_text(AGENT_WITH_GPUS, encoding="utf-8")
    process = hosts.start([str(program)], **nodes.environment())
    out, _ = process.communicate(timeout=90)
    assert out == "visible: 0,1\n"


def test_an_address_that_no_node_has(nodes: RayNodes, hosts: Hosts) -> None:
    (hosts.folder / "config/moai/cluster.toml").write_text(
        '[cluster]\nlauncher = "ray"\n[[host]]\nname = "localhost"\nworkers = 1\nmemory = "1GB"\n'
        '[[host]]\nname = "node1"\naddress = "localhost"\nworkers = 1\nmemory = "1GB"\n',
        encoding="utf-8",
    )
    code, out = run(hosts, nodes.environment())
    assert code != 0
    assert "error: Ray: no node but this one has the address " in out
    assert " of `node1`. Ray has " in out


def test_what_the_agent_says_is_the_error(nodes: RayNodes, hosts: Hosts) -> None:
    hosts.write(launcher="ray", port=0, command="/nowhere/moaic")
    code, out = run(hosts, nodes.environment())
    assert code != 0
    assert "error: the agent of host `node1` could not be started by Ray: /bin/sh: " in out
    assert "/nowhere/moaic: not found" in out


def test_without_the_files_of_tls(nodes: RayNodes, hosts: Hosts) -> None:
    code, out = run(hosts, {**nodes.environment(), "RAY_TLS_SERVER_CERT": "/nowhere"})
    assert code != 0
    assert "error: RAY_TLS_SERVER_CERT names no file, and Ray uses TLS" in out


def test_without_protection(nodes: RayNodes, hosts: Hosts) -> None:
    code, out = run(hosts, {**nodes.environment(), "RAY_AUTH_MODE": "disabled"})
    assert code != 0
    assert "error: Ray is not protected, as RAY_AUTH_MODE=token is not set: whoever reaches it may run any code" in out
    assert "trusted_network = true" in out


@pytest.mark.exact
def test_with_another_token(nodes: RayNodes, hosts: Hosts) -> None:
    token = hosts.folder / "token"
    token.write_text("0" * 64, encoding="ascii")
    code, out = run(hosts, {**nodes.environment(), "RAY_AUTH_TOKEN_PATH": str(token)})
    assert code != 0
    assert "error: Ray has not answered within 20 s; its last words: " in out
    assert "Authentication token is missing or incorrect" in out
    check_nothing_left(hosts)


def test_where_no_ray_runs(nodes: RayNodes, hosts: Hosts) -> None:
    address = f"{hosts.network.address(1)}:6400"
    code, out = run(hosts, {**nodes.environment(), "RAY_ADDRESS": address})
    assert code != 0
    assert f"error: Ray: no cluster answers at {address}, which RAY_ADDRESS names: Connection refused" in out
