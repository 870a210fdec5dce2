"""`moaic cluster check`: what it says of hosts that are well, and of each that is not, beside all others."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.hosts import ROOT, Hosts, ip


def checked(hosts: Hosts, *words: str, **more: str) -> tuple[int, str]:
    """Exit code and output of a check whose agents have been started."""
    process = hosts.start(["-m", "moaic", "cluster", "check", *words], **more)
    out, _ = process.communicate(timeout=60)
    return process.returncode, out


def data(out: str) -> dict[str, Any]:
    """The JSON behind what the launcher has said."""
    return json.loads(out[out.index("{\n") :])


def test_all_is_well(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.start_agents()
    code, out = checked(hosts, "--folder", ".", "--json", MOAI_COMPILE="1")
    assert code == 0, out
    found = data(out)
    assert found["problems"] == found["warnings"] == []
    assert [(host["name"], host["state"]["folder"]) for host in found["hosts"]] == [
        ("localhost", "shared"),
        ("node1", "shared"),
    ]
    assert {(link["from"], link["to"]) for link in found["links"]} == {("localhost", "node1"), ("node1", "localhost")}
    assert all(link["rate"] > 1e6 and 0 < link["round_trip"] < 1 for link in found["links"])
    assert hosts.end() == [0]
    assert "checked by the program at" in hosts.said(1)
    assert not list(hosts.folder.glob(".moaic-check-*"))


def test_hosts_that_are_not_well_do_not_hide_the_others(cluster: Cluster) -> None:
    hosts = cluster(1, 1, 1, 1)
    hosts.write(wait=8)
    fake = hosts.folder / "fake/torch-2.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n", encoding="utf-8")
    hosts.start_agent(1, PYTHONPATH=os.pathsep.join([str(fake.parent), str(ROOT)]))
    hosts.start_agent(2)
    code, out = checked(hosts)
    assert code == 1, out
    assert "problem  host `node1` has PyTorch 2.0.0, this one" in out
    assert "problem  nobody on `node3` answered within 8 s" in out
    assert "fix: try there: moaic agent --connect" in out
    rows = {line.split()[0]: line.split()[1:4] for line in out.splitlines() if line.startswith(("localhost ", "node"))}
    assert list(rows) == ["localhost", "node1", "node2", "node3"]
    assert out.count("\nnode2 ") == 3
    assert "cannot connect" not in out
    assert hosts.end() == [0, 0]


def test_a_firewall_between_two_other_hosts(cluster: Cluster) -> None:
    hosts = cluster(1, 1, 1)
    if not hosts.network.has_namespaces:
        pytest.skip("only namespaces have networks of their own")
    ip("-n", hosts.network.name(1), "route", "add", "blackhole", hosts.network.address(2))
    hosts.start_agents()
    code, out = checked(hosts)
    assert code == 1, out
    assert "workers of host `node1` cannot connect to those of `node2`: " in out
    assert "workers of host `node2` cannot connect to those of `node1`: timed out" in out
    assert out.count("cannot connect") == 2
    assert hosts.end() == [0, 0]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare")
def test_a_folder_that_is_not_shared(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = cluster(1, 1)
    shared = hosts.folder / "checkpoints"
    shared.mkdir()
    inside = hosts.network.inside

    def apart(host: int, command: Sequence[str]) -> list[str]:
        hides = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {shared} && exec "$@"', "sh"]
        return inside(host, [*hides, *command] if host else command)

    if subprocess.run(apart(1, ["true"]), check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount")
    monkeypatch.setattr(hosts.network, "inside", apart)
    hosts.start_agents()
    code, out = checked(hosts, "--folder", str(shared))
    assert code == 1, out
    assert f"problem  {shared} is no folder of this host on `node1`" in out


def test_a_host_without_a_compiler_with_less_memory_and_a_wrong_address(cluster: Cluster) -> None:
    hosts = cluster(1, 1, 1)
    path = hosts.folder / "config/moai/cluster.toml"
    text = path.read_text(encoding="utf-8").replace(hosts.network.address(1), "203.0.113.9")
    head, _, last = text.rpartition('"2GB"')
    path.write_text(f'{head}"900TB"{last}', encoding="utf-8")
    hosts.start_agent(1)
    hosts.start_agent(2, CXX="/nowhere/g++")
    code, out = checked(hosts, MOAI_COMPILE="1")
    assert code == 1, out
    assert "host `node1`: workers cannot listen on 203.0.113.9" in out
    assert "host `node2` has no C++ compiler" in out
    assert "of memory, and cluster.toml says 921600.0 GiB" in out
    assert "MB/s from, to  localhost  node2" in out


def test_an_agent_that_stays_serves_a_check_and_then_a_program(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.start_agent(1, "--stay")
    code, out = checked(hosts, "--folder", ".")
    assert code == 0, out
    program = hosts.start(["-c", "import torch; print(torch.ones(4).to('moai').sum().item())"])
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 0, out
    assert "4.0" in out


def test_a_host_without_an_address_does_not_hide_the_others(cluster: Cluster) -> None:
    hosts = cluster(1, 1, 1)
    path = hosts.folder / "config/moai/cluster.toml"
    text = path.read_text(encoding="utf-8").replace(hosts.network.address(2), "nowhere.invalid")
    path.write_text(text, encoding="utf-8")
    hosts.start_agent(1)
    code, out = checked(hosts)
    assert code == 1, out
    assert "problem  the address `nowhere.invalid` of host `node2` cannot be found: " in out
    assert "MB/s from, to  localhost  node1" in out


ENDED_AMID_A_CALLBACK = """
import os, signal, time, weakref
from moaic.cli.cluster_command import orderly_end

class Lock: pass

with orderly_end():
    lock = Lock()
    watched = weakref.ref(lock, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    del lock
    try:
        time.sleep(60)
    finally:
        print("cleaned up")
"""


def test_an_end_amid_a_callback_is_not_dropped() -> None:
    program = [sys.executable, "-c", ENDED_AMID_A_CALLBACK]
    done = subprocess.run(program, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGTERM, "cleaned up\n", "")


def test_a_check_that_is_ended_leaves_no_file(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    process = hosts.start(["-m", "moaic", "cluster", "check"])
    until = time.monotonic() + 30
    while not (left := list(hosts.folder.glob(".moaic-check-*"))):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "Traceback" not in out
    assert not left[0].exists()
