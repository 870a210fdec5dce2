"""What the launcher for Slurm asks of it, and its errors, with commands that stand for those of Slurm."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings, LauncherName
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.launchers.launcher import Invitation
from moaic.runtime.launch.launchers.munge import munge_of
from moaic.runtime.launch.launchers.slurm import Slurm, nodes_of
from tests.cluster.slurm_cluster import wait_until

SETTINGS = ClusterSettings(LauncherName.SLURM, command="moaic")

SCONTROL = """
if [ "$2" = config ]; then echo "AuthType = $AUTH"; exit; fi
if [ "$2" = hostnames ]; then echo $3 | tr , '\\n'; exit; fi
echo $4 | tr , '\\n' | sed 's/.*/NodeName=& Arch=x86_64 NodeAddr=10.0.0.&  NodeHostName=& Version=22.05/'
"""

SRUN = 'read secret; echo "$@" > {0}/arguments; echo $secret > {0}/secret; env > {0}/environment'

MUNGE = "echo MUNGE:$1:; rev"


@pytest.fixture
def job(tmp_path: Path) -> dict[str, str]:
    """The variables of a program on node 1 of an allocation of three, whose names do not lead to addresses."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN.format(tmp_path)), ("munge", MUNGE)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "AUTH": "auth/munge",
        "SLURM_JOB_NODELIST": "node-1.invalid,node-2.invalid,node-3.invalid",
        "SLURMD_NODENAME": "node-1.invalid",
    }


def launcher(environment: dict[str, str]) -> Slurm:
    return Slurm(SETTINGS, environment, print)


def shares(*names: str) -> list[HostShare]:
    return [HostShare(name, name, 1) for name in names]


@pytest.mark.parametrize(
    ("hosts", "nodes"),
    [
        (["a", "b"], ["n1", "n2"]),
        (["n2", "b"], ["n2", "n1"]),
        (["a", "n1"], ["n2", "n1"]),
        (["n9", "n3", "n8"], ["n1", "n3", "n2"]),
    ],
)
def test_a_host_is_the_node_of_its_name_or_the_next_free_one(hosts: Sequence[str], nodes: Sequence[str]) -> None:
    assert nodes_of(shares(*hosts), ["n1", "n2", "n3"]) == nodes


def test_hosts_get_the_names_of_their_nodes_and_addresses_of_slurm_or_the_user(
    job: dict[str, str],
) -> None:
    hosts = [HostShare("node", "10.1.1.1", 4), HostShare("other", "other", 2)]
    assert launcher(job).place(hosts, 5.0) == (
        HostShare("node-2.invalid", "10.1.1.1", 4),
        HostShare("node-3.invalid", "10.0.0.node-3.invalid", 2),
    )


def started(job: dict[str, str], folder: Path) -> tuple[str, str, str, str]:
    """The secret of a launch, then the arguments, standard input and environment of srun."""
    slurm = launcher({**job, "MOAI_TOKEN": "old", "SLURM_EXACT": "1", "SLURM_CONF": "file"})
    placed = slurm.place(shares("a", "b"), 5.0)
    secrets = slurm.secrets([share.name for share in placed])
    slurm.start(placed, Invitation(("10.0.0.1", 4711), secrets))
    slurm.end(5.0)
    (secret,) = set(secrets.values())
    arguments, said, environment = (
        (folder / name).read_text("utf-8") for name in ("arguments", "secret", "environment")
    )
    return secret, arguments, said.strip(), environment


def test_the_secret_is_standard_input_and_nothing_else(
    job: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, arguments, said, environment = started({**job, "AUTH": "auth/slurm"}, tmp_path)
    assert "--jobid=7 --nodes=2 --ntasks=2 --nodelist=node-2.invalid,node-3.invalid --overlap --mem=0" in arguments
    assert ' exec moaic agent --connect 10.0.0.1:4711 --host "$SLURMD_NODENAME" --wait 0' in arguments
    assert said == secret
    for word in (secret, "MOAI_TOKEN", "SLURM_EXACT"):
        assert word not in arguments + environment
    assert "SLURM_CONF=file" in environment
    assert "Slurm sends the secret of the agents unencrypted" in capsys.readouterr().out


def test_munge_protects_the_secret(
    job: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", job["PATH"])
    secret, arguments, said, _ = started(job, tmp_path)
    assert "unmunge --metadata=/dev/null | exec moaic agent " in arguments
    assert said == f"MUNGE:--restrict-uid={os.getuid()}:"
    assert secret not in said
    assert not capsys.readouterr().out


def test_the_host_whose_agent_fails_is_named(job: dict[str, str], tmp_path: Path) -> None:
    lines = "srun: cluster configuration lacks support for cpu binding\nsrun: error: node-3.invalid: task 1: Exited"
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho '{lines}' >&2\nsleep 60\n", encoding="utf-8")
    slurm = launcher({**job, "AUTH": "auth/slurm"})
    placed = slurm.place(shares("a", "b"), 5.0)
    slurm.start(placed, Invitation(("10.0.0.1", 4711), slurm.secrets([share.name for share in placed])))
    wait_until(slurm.failed, "a failure")
    assert slurm.failed() == {"node-3.invalid": "srun: error: node-3.invalid: task 1: Exited"}
    slurm.end(0.0)


def test_where_munge_listens() -> None:
    munge = munge_of("AuthAltTypes = (null)\nAuthInfo    = ttl=9,socket=/run/m.socket\nAuthType   = auth/munge\n")
    assert munge is not None
    assert munge.unseal.endswith("| unmunge --metadata=/dev/null --socket=/run/m.socket")
    assert munge_of("AuthInfo = (null)\nAuthType = auth/slurm\n") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "needs an allocation, and this program runs in none: SLURM_JOB_ID is not set"),
        ({"SLURM_JOB_NODELIST": ""}, "this program runs in none: SLURM_JOB_NODELIST is not set"),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started this program 4 times, and it has to run once"),
        ({"PATH": "/nowhere"}, "needs srun, which is not in PATH"),
        ({"SLURMD_NODENAME": "login"}, "runs on `login`, which is no node of its allocation: node-1.invalid, node-2"),
        (
            {"SLURM_JOB_NODELIST": "node-1.invalid,node-2.invalid"},
            r"the flavor needs 2 other hosts \(`a`, `b`\), and the allocation has 1 other node: node-2.invalid",
        ),
    ],
)
def test_an_unsuitable_allocation_is_an_error(job: dict[str, str], change: dict[str, str], message: str) -> None:
    with pytest.raises(Diagnostic, match=message) as raised:
        launcher({**job, **change}).place(shares("a", "b"), 5.0)
    assert raised.value.hint


def test_what_scontrol_says_is_the_error(job: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho 'Invalid hostlist' >&2; exit 1\n", encoding="utf-8")
    with pytest.raises(Diagnostic, match="scontrol hostnames: Invalid hostlist"):
        launcher(job).place(shares("a"), 5.0)
