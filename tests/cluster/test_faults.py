"""What goes wrong in a cluster: one clear message in time, and nothing left running on any host."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.hosts import Hosts

TRAIN = """
import sys, time, torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).to("moai")
compiled = torch.compile(model, backend="moai")
x = torch.randn(16, 64).to("moai")
def step():
    compiled(x).square().mean().backward()
    return model.weight.grad.sum().item()
step()
from moaic.runtime.controller import session
print("ready", *session.SESSION.accelerator()._pool.greeted.values(), flush=True)
while True:
    step()
"""

SEND = str(Path(__file__).with_name("compile_functions.py"))
"""A program whose two stages are on two hosts; it starts faster than one that trains."""

SENDS = f"""
import sys
sys.path.insert(0, {str(Path(SEND).parent)!r})
from compile_functions import run, text
from moaic.runtime.controller.session import accelerator
device = accelerator()
program = device.load(text("pp=2"), compiled=False)
run(device, program, op_by_op=False)
print("ready", *device._pool.greeted.values(), flush=True)
while True:
    run(device, program, op_by_op=False)
"""
"""The same for ever."""

SECONDS = 25.0
"""Within which every failure must have been reported, start-up of the second process included."""


def program(hosts: Hosts, text: str = TRAIN) -> list[str]:
    file = hosts.folder / "program.py"
    file.write_text(text, encoding="utf-8")
    return [str(file)]


def ready(hosts: Hosts, text: str = SENDS) -> tuple[subprocess.Popen[str], list[int]]:
    """A program that runs for ever on all hosts, and the processes of its workers."""
    hosts.start_agents()
    process = hosts.start(program(hosts, text), MOAI_PLAN="dp=2")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            return process, [int(word) for word in line.split()[1:]]
    raise AssertionError("the program did not start")


def ended(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    return out


def are_gone(pids: list[int]) -> bool:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_a_worker_of_another_host_is_killed(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    process, (_, there) = ready_sorted(hosts)
    os.kill(there, signal.SIGKILL)
    assert "WorkerError: worker 1 of 2 (node1) failed in" in (out := ended(process))
    assert "the process was killed by SIGKILL" in out
    assert hosts.end() == [0]


def test_an_agent_is_killed(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    process, pids = ready(hosts)
    hosts.agents[0].kill()
    assert "the connection to host node1 has ended" in ended(process)
    assert are_gone(pids)


def test_the_network_drops_in_the_middle_of_a_step(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    if not hosts.network.has_namespaces:
        pytest.skip("only namespaces have a network that can be cut")
    process, pids = ready(hosts)
    hosts.network.cut(1)
    assert "node1" in ended(process)
    hosts.end()
    assert are_gone(pids)


def test_the_program_is_killed(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    process, pids = ready(hosts)
    process.kill()
    process.communicate()
    assert hosts.end() == [0]
    assert are_gone(pids)


DOWNLOADS = (
    TRAIN.replace("Linear(64, 64)", "Linear(2048, 4096)")
    .replace("randn(16, 64)", "randn(16, 2048)")
    .replace(
        "while True:\n    step()",
        """
for _ in range(40):
    model.weight.detach().cpu()
    time.sleep(0.05)
print("downloaded", step(), flush=True)
""",
    )
)


@pytest.mark.exact
def test_a_program_that_does_not_read_for_a_while_goes_on(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.start_agents()
    process = hosts.start(program(hosts, DOWNLOADS), MOAI_PLAN="dp=2,distribute_param=use")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready"):
            break
    for _ in range(2):
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        time.sleep(14)
        process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=60)
    assert "downloaded" in out
    assert process.returncode == 0, out


def test_an_agent_stays_for_the_next_program(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.start_agent(1, "--stay")
    for _ in range(2):
        code, out = hosts.finish([SEND, "pp=2", "never"])
        assert code == 0, out
    assert hosts.agents[0].poll() is None


def test_a_host_that_does_not_come(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.write(wait=1)
    out = ended(hosts.start(program(hosts)))
    assert "nobody on `node1` answered within 1 s" in out
    assert "moaic agent --connect" in out


def test_a_host_that_came_is_let_go_if_another_does_not_come(cluster: Cluster) -> None:
    hosts = cluster(1, 1, 1)
    hosts.write(wait=4)
    first = hosts.start_agent(1)
    waits = "import time\ntry:\n    step()\nexcept Exception as error:\n    print(error, flush=True)\ntime.sleep(60)\n"
    start = "import torch\ndef step():\n    torch.zeros(1).to('moai')\n"
    process = hosts.start(program(hosts, start + waits))
    assert first.wait(30) != 0
    assert process.poll() is None
    process.kill()
    assert "nobody on `node2` answered within 4 s" in process.communicate()[0]
    assert "has let this host go" in hosts.said(1)


def test_a_wrong_secret(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    hosts.write(wait=6)
    agent = hosts.start_agent(1, MOAI_TOKEN="0" * 64)
    out = ended(hosts.start(program(hosts)))
    assert "was refused: its proof does not fit the token of host `node1`" in out
    assert agent.wait(10) != 0
    assert "refused this host" in hosts.said(1)
    assert hosts.secret not in out + hosts.said(1)


def test_a_program_without_a_secret(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    out = ended(hosts.start(program(hosts), MOAI_TOKEN=""))
    assert "agents that connect need a secret" in out
    assert "export MOAI_TOKEN" in out


def test_another_version_of_pytorch(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    fake = hosts.folder / "fake/torch-2.0.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n", encoding="utf-8")
    root = os.pathsep.join([str(fake.parent), str(Path(__file__).resolve().parents[2])])
    agent = hosts.start_agent(1, PYTHONPATH=root)
    assert "host `node1` has PyTorch 2.0.0, this one" in ended(hosts.start(program(hosts)))
    assert agent.wait(10) != 0


def test_an_address_that_is_not_the_hosts_own(cluster: Cluster) -> None:
    hosts = cluster(1, 1)
    path = hosts.folder / "config/moai/cluster.toml"
    path.write_text(path.read_text(encoding="utf-8").replace(hosts.network.address(1), "203.0.113.9"), encoding="utf-8")
    hosts.start_agents()
    out = ended(hosts.start(program(hosts)))
    assert "host `node1`: workers cannot listen on 203.0.113.9" in out


def ready_sorted(hosts: Hosts) -> tuple[subprocess.Popen[str], tuple[int, int]]:
    """As `ready` for a program that trains, with the worker of its host first."""
    process, pids = ready(hosts, TRAIN)
    here, there = sorted(pids, key=lambda pid: Path(f"/proc/{pid}/ns/net").stat().st_ino != _net(process.pid))
    return process, (here, there)


def _net(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/net").stat().st_ino
