"""Clusters as TOML: what a file says, and what is refused with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moaic.cli import main
from moaic.ir.errors import Diagnostic
from moaic.passes.perf.links import RankGroup
from moaic.passes.perf.numbers import MeasureSource, Number
from moaic.predict.cluster_file import Cluster, read_cluster
from moaic.runtime.host.cluster import listed_hosts
from moaic.runtime.host.memory import USABLE
from moaic.text.units import GIB

DEVICE = """
[[device]]
name = "half an H100"
target = "sm_90"
memory = "40GB"
bandwidth = [1.6e12, "measured"]
matmul = { bf16 = 500e12 }
efficiency = { matmul = [0.5, "published"], attention = 0.25 }
contention = 0.2
"""

LINKS = """
[[link]]
level = "host"
joins = 4
rate = [100e9, "published"]
latency = 1e-6

[[link]]
level = "between"
rate = 50e9
shared = true
"""

RACK = """[[link]]
level = "package"
joins = 6
rate = 1e12
"""

HOSTS = """
[[host]]
name = "node"
count = 3
workers = 4
device = "half an H100"
"""


def cluster(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_a_device_has_what_its_target_has_unless_the_file_says_more(tmp_path: Path) -> None:
    machine = cluster(tmp_path, DEVICE + LINKS + HOSTS).machine(12)
    assert (machine.workers, machine.memory) == (12, int(USABLE * 40 * GIB))
    assert machine.bandwidth == Number(1.6e12, MeasureSource.MEASURED)
    assert machine.rate("mm", "bf16") == Number(250e12, MeasureSource.ASSUMED)
    assert machine.rate("mm", "f16") == Number(989e12 / 2, MeasureSource.PUBLISHED)
    assert machine.rate("sdpa", "bf16").value == 125e12
    assert machine.contention == 0.2
    assert machine.overlaps
    assert machine.adds_traffic


def test_a_shared_card_is_shared_by_the_workers_of_a_unit(tmp_path: Path) -> None:
    machine = cluster(tmp_path, DEVICE + LINKS + HOSTS).machine(12)
    inside, between = (machine.message(1e9, lambda workers, most=most: workers >= most) for most in (4, 5))
    assert inside == Number(1e-6 + 1e9 / 100e9, MeasureSource.ASSUMED)
    assert between.value == pytest.approx(1e9 / 12.5e9, rel=1e-3)


@pytest.mark.parametrize("workers", [3, 5, 6, 12])
def test_a_host_may_have_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    text = (LINKS + HOSTS).replace("joins = 4", f"joins = {workers}").replace("workers = 4", f"workers = {workers}")
    machine = cluster(tmp_path, DEVICE + text).machine(3 * workers)
    inside, whole = RankGroup(workers, 1, machine.workers), RankGroup(3, workers, machine.workers)
    assert machine.collective("all_gather", 1e9, inside).value == pytest.approx(
        1e9 * (1 - 1 / workers) / 100e9, rel=1e-2
    )
    assert machine.collective("all_gather", 1e9, whole).value == pytest.approx(1e9 * 2 / 3 * workers / 50e9, rel=1e-2)


def test_editors_may_mark_a_file_as_utf_8(tmp_path: Path) -> None:
    assert cluster(tmp_path, "\ufeff" + DEVICE + LINKS).device == cluster(tmp_path, DEVICE + LINKS).device


def test_hosts_are_those_that_the_runtime_lists(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(DEVICE + LINKS + HOSTS, encoding="utf-8")
    listed = listed_hosts(path, 1 << 40)
    assert [(host.name, host.workers, host.memory) for host in listed] == [
        (f"node{number}", 4, 4 * 40 * GIB) for number in (1, 2, 3)
    ]
    assert read_cluster(path).workers == 12


def test_a_file_of_little_means_the_same_to_both_readers(tmp_path: Path) -> None:
    text = DEVICE.replace('memory = "40GB"\n', "") + LINKS + HOSTS.replace('device = "half an H100"\n', "")
    assert cluster(tmp_path, text).device.memory == 80 * 10**9
    listed = listed_hosts(tmp_path / "cluster.toml", 1 << 40)
    assert [host.memory for host in listed] == 3 * [4 * 80 * 10**9]


def test_workers_of_several_kinds_are_described_each_the_fastest_first(tmp_path: Path) -> None:
    other = DEVICE.replace("half an H100", "slow").replace("500e12", "100e12").replace("40GB", "80GB")
    text = other + DEVICE + LINKS + HOSTS.replace("node", "old").replace("half an H100", "slow") + HOSTS
    machine = cluster(tmp_path, text).machine(24)
    assert machine.rate("mm", "bf16").value == 50e12
    assert (machine.memory, machine.most_memory) == (int(USABLE * 40 * GIB), int(USABLE * 80 * GIB))
    fast, slow = machine.by_kind
    assert [each.rate("mm", "bf16").value for each in (fast, slow)] == [250e12, 50e12]
    assert [each.name for each in (fast, slow)] == ["half an H100, cluster", "slow, cluster"]
    assert machine.all_memory(13) == 12 * fast.memory + slow.memory
    assert machine.all_memory(5) == 5 * fast.memory == fast.all_memory(5)
    assert [each.memory for each in (fast, slow)] == [int(USABLE * 40 * GIB), int(USABLE * 80 * GIB)]
    ranks = (range(12), range(11, 13), range(12, 24), range(30))
    assert [machine.slowest_kind(each) for each in ranks] == [0, 1, 1, 1]
    more = HOSTS.replace("node", "late").replace("device =", 'memory = "80GB"\ndevice =')
    assert [kind.workers for kind in cluster(tmp_path, text + more).machine(36).kinds] == [12, 12, 12]
    more = HOSTS.replace("node", "late")
    assert [kind.workers for kind in cluster(tmp_path, text + more).machine(36).kinds] == [24, 12]
    assert cluster(tmp_path, DEVICE + LINKS + HOSTS + HOSTS.replace("node", "old")).machine(24).by_kind == [
        replace(fast, name="half an H100, cluster")
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "describes no device"),
        (DEVICE, "describes no link"),
        (DEVICE + DEVICE + LINKS, "device `half an H100` is described twice"),
        (DEVICE.replace("sm_90", "sm_30") + LINKS, "there is no target `sm_30`"),
        (DEVICE.replace("memory", "memori") + LINKS, "a device has no `memori`"),
        (DEVICE.replace("40GB", "40") + LINKS, 'needs memory, an amount such as "16GB"'),
        (DEVICE.replace("500e12", '"fast"') + LINKS, "matmul is a number, or a number and its source, not `fast`"),
        (DEVICE.replace("measured", "seen") + LINKS, "bandwidth is a number, or a number and its source"),
        (DEVICE.replace("1.6e12", "0") + LINKS, "bandwidth is a number above 0"),
        *(
            (DEVICE.replace("1.6e12", each) + LINKS, "bandwidth is a number above 0")
            for each in ("nan", "inf", "9" * 400)
        ),
        (DEVICE.replace("contention = 0.2", "contention = -1") + LINKS, "contention is a number at least 0"),
        (DEVICE.replace("40GB", "9" * 400 + "GB") + LINKS, "needs memory, an amount such as"),
        (DEVICE.replace("bf16", "bf17") + LINKS, "there is no element type `bf17`"),
        (DEVICE.replace("{ bf16 = 500e12 }", "1") + LINKS, "matmul is a table such as {bf16 = 989e12}"),
        (DEVICE.replace("attention", "attending") + LINKS, "there is no efficiency of `attending`"),
        (DEVICE.replace("0.25", "1.5") + LINKS, "the efficiency of attention is a share from 0 to 1"),
        ('[[device]]\nname = "x"\n' + LINKS, "a device needs a rate of matrix products in f32"),
        ('[[device]]\nname = "x"\nmatmul = { f32 = 1e12 }\n' + LINKS, "a device needs vector, a number"),
        (
            DEVICE + LINKS.replace("joins = 4", ""),
            "needs joins, a whole number of workers: at least 2",
        ),
        (DEVICE + LINKS.replace("rate = 50e9", ""), "a link needs rate, a number"),
        (
            DEVICE + LINKS.replace("rate = 50e9", "joins = 8\nrate = 50e9"),
            "is the last, which joins all",
        ),
        (DEVICE + LINKS.replace("[[link]]", RACK + "\n[[link]]", 1), "a multiple of the 6 of the level before"),
        (DEVICE + LINKS.replace("shared", "direct"), "it has no link for every pair"),
        (DEVICE + LINKS.replace("between", "host"), "a link needs a level, a name of its own"),
        (
            DEVICE + LINKS + HOSTS.replace("workers = 4", "workers = 6"),
            "a host of 6 workers beside a level of 4",
        ),
        (
            DEVICE + LINKS + HOSTS + HOSTS.replace("node", "old").replace("workers = 4", "workers = 3"),
            "a host of 3 workers beside a level of 4",
        ),
        (DEVICE + LINKS.replace("shared = true", "shared = 1"), "shared is true or false, not `1`"),
        (DEVICE + LINKS.replace("latency = 1e-6", "latency = true"), "latency is a number"),
        (DEVICE + LINKS.replace('level = "host"', ""), "a link needs a level, a name"),
        (DEVICE + LINKS + HOSTS.replace("half an H100", "new"), "there is no device `new`"),
        (DEVICE + LINKS + HOSTS.replace("3", "0"), "count is an integer from 1 to 100000"),
        (DEVICE + LINKS + "[[hosts]]\n", "`hosts` is no list of tables [[device]] or [[link]] or [[host]]"),
    ],
)
def test_what_a_file_may_not_say_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Diagnostic) as error:
        cluster(tmp_path, text)
    assert said in error.value.message


def test_a_cluster_has_no_more_workers_than_its_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(DEVICE + LINKS + HOSTS, encoding="utf-8")
    assert main(["guide", "llama", "--machine", str(path), "--workers", "16"]) == 2
    assert f"error: the hosts of {path} have 12 workers, not 16" in capsys.readouterr().err
