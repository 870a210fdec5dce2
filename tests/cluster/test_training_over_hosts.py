"""Training over hosts equals training on one device, and is bit for bit what one host with as many workers computes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cluster.conftest import Cluster
from tests.cluster.hosts import ROOT, on_cores

PROGRAM = str(Path(__file__).with_name("train_plans.py"))

SOME = ("use", "tp2", "pp2")

TWO = (*SOME, "dp2", "optimizer", "step", "cp2", "dp2_mb2")

FOUR = (
    *("dp4", "use4", "dp2_tp2", "dp2_cp2", "tp4", "cp4"),
    *("pp2_dp2_gpipe", "pp2_dp2_1f1b", "pp2_dp2_zero-bubble"),
)


def on_one_host(workers: int, words: Sequence[str], folder: Path) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "MOAI_FLAVOR": str(workers),
        "MOAI_COMPILE": "0",
        "XDG_CONFIG_HOME": str(folder / "none"),
    }
    command = [*on_cores(0, workers), sys.executable, PROGRAM, *words]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def digests(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("digest")]


def check_same_bits(cluster: Cluster, shares: Sequence[int], words: Sequence[str], folder: Path) -> None:
    hosts = cluster(*shares)
    code, text = hosts.run([PROGRAM, *words], 600)
    assert code == 0, text
    assert hosts.end() == [0] * (len(shares) - 1)
    found = digests(text)
    assert len(found) == len(words) - 1
    assert found == digests(on_one_host(sum(shares), words, folder))


def test_two_hosts_with_a_worker_each(cluster: Cluster, tmp_path: Path) -> None:
    check_same_bits(cluster, (1, 1), ("llama", *SOME), tmp_path)


@pytest.mark.exact
@pytest.mark.parametrize("shares", [(2, 2), (3, 1), (1, 3), (1, 1, 1, 1)])
def test_four_workers(cluster: Cluster, tmp_path: Path, shares: tuple[int, ...]) -> None:
    check_same_bits(cluster, shares, ("llama", *FOUR), tmp_path)


@pytest.mark.exact
@pytest.mark.parametrize("shares", [(2, 1), (1, 1, 1)])
def test_three_workers(cluster: Cluster, tmp_path: Path, shares: tuple[int, ...]) -> None:
    """Most parameters have no dim that divides by three: their shards are uneven."""
    check_same_bits(cluster, shares, ("llama", "use3", "optimizer3"), tmp_path)


@pytest.mark.exact
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "resnet"])
def test_other_families(cluster: Cluster, tmp_path: Path, family: str) -> None:
    plans = [plan for plan in TWO if plan not in ("cp2", "pp2") or family != "resnet"]
    check_same_bits(cluster, (1, 1), (family, *plans, *(["ep2"] if family == "mixtral" else [])), tmp_path)
