"""Training over hosts equals training on one device, and is bit for bit what one host with as many workers computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.hosts import ROOT, Hosts, on_cores

PROGRAM = str(Path(__file__).with_name("train_plans.py"))

SOME = ("use", "tp2", "pp2")

TWO = (*SOME, "dp2", "optimizer", "step", "cp2", "dp2_mb2")

FOUR = (
    *("dp4", "use4", "dp2_tp2", "dp2_cp2", "tp4", "cp4"),
    *("pp2_dp2_gpipe", "pp2_dp2_1f1b", "pp2_dp2_zero-bubble"),
)


@cache
def on_one_host(workers: int, words: tuple[str, ...]) -> list[str]:
    """What workers on cores of this host compute."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MOAI_FLAVOR": str(workers),
        "MOAI_COMPILE": "0",
        "XDG_CONFIG_HOME": str(ROOT / "none"),
    }
    command = [*on_cores(0, workers), sys.executable, PROGRAM, *words]
    return digests(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def digests(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("digest")]


def over_hosts(hosts: Hosts, words: tuple[str, ...], carrier: str = "memory", **variables: str) -> list[str]:
    """What the workers of these hosts compute, and that this has carried their data."""
    code, text = hosts.run([PROGRAM, *words], 600, **variables)
    assert code == 0, text
    assert f"carrier {carrier}\n" in text
    assert hosts.end() == [0] * (len(hosts.workers) - 1)
    found = digests(text)
    assert len(found) == len(words) - 1
    return found


def check_same_bits(cluster: Cluster, shares: Sequence[int], words: tuple[str, ...]) -> None:
    assert over_hosts(cluster(*shares), words) == on_one_host(sum(shares), words)


def test_two_hosts_with_a_worker_each(cluster: Cluster) -> None:
    check_same_bits(cluster, (1, 1), ("llama", *SOME))


def test_workers_that_emulate_gpus(cluster: Cluster) -> None:
    """What they compute is copied to the host and carried there: the bits are those of workers on cores."""
    expected = on_one_host(2, ("llama", *SOME))[:1]
    assert over_hosts(cluster(1, 1), ("llama", SOME[0]), MOAI_WORKERS="triton") == expected


@pytest.mark.exact
@pytest.mark.parametrize("shares", [(2, 2), (1, 1, 1, 1), (3, 1)])
def test_process_groups_where_the_network_is_trusted(cluster: Cluster, shares: tuple[int, ...]) -> None:
    hosts, words = cluster(*shares), ("llama", *FOUR)
    hosts.write(trusted_network=True)
    assert over_hosts(hosts, words, "gloo", MOAI_WORKERS="triton") == on_one_host(4, words)


@pytest.mark.exact
@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (1, 3), (1, 1, 1, 1)])
def test_four_workers(cluster: Cluster, shares: tuple[int, ...]) -> None:
    check_same_bits(cluster, shares, ("llama", *FOUR))


@pytest.mark.exact
@pytest.mark.parametrize("shares", [(2, 1), (1, 1, 1)])
def test_three_workers(cluster: Cluster, shares: tuple[int, ...]) -> None:
    """Most parameters have no dim that divides by three: their shards are uneven."""
    check_same_bits(cluster, shares, ("llama", "use3", "optimizer3"))


@pytest.mark.exact
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "resnet"])
def test_other_families(cluster: Cluster, family: str) -> None:
    # A pipeline cannot wait for the sum over all micro-batches that a router's loss needs; a ResNet has no sequence.
    impossible = {"mixtral": ["pp2"], "resnet": ["cp2", "pp2"]}.get(family, [])
    plans = [plan for plan in TWO if plan not in impossible]
    check_same_bits(cluster, (1, 1), (family, *plans, *(["ep2"] if family == "mixtral" else [])))
