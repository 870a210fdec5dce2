"""Flavors by a cluster file: those of this host run within its limits; the others if it says how they start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from moaic.ir.errors import Diagnostic
from moaic.runtime.host import flavors as known_flavors
from moaic.runtime.host.cluster import listed_hosts
from moaic.runtime.host.flavors import Flavor, Host, HostShare, asked_for, flavors, ladder, this_host
from moaic.runtime.host.gpus import Gpu
from moaic.runtime.host.selection import AcceleratorSelection, current_flavor, keep
from moaic.text.units import GIB
from moaic.tools import doctor
from moaic.tools.doctor import Finding, FindingState, findings
from tests.docs.blocks import ROOT, blocks

if TYPE_CHECKING:
    from tests.tools.conftest import Person

CLUSTER = """
[[host]]
name = "node2"
workers = 4
memory = "32GB"

[[host]]
name = "localhost"
workers = 2
memory = "1.5GB"

[[host]]
name = "node3"
workers = 8
memory = "96GB"
"""

STARTED = f"""
[cluster]
launcher = "ssh"
listen = "10.0.0.1"
{CLUSTER}"""


def test_this_host_comes_first_and_the_others_follow_the_file(person: Person) -> None:
    person.cluster_file.write_text(CLUSTER, encoding="utf-8")
    assert flavors(person.environment) == [
        Flavor("Small", 1, 3 * GIB // 4),
        Flavor("Medium", 2, 3 * GIB // 2),
        Flavor("Large", 4, 3 * GIB // 2 + 16 * GIB, (HostShare("node2", "node2", 2),)),
        Flavor(
            "xLarge",
            8,
            3 * GIB // 2 + (32 + 24) * GIB,
            (HostShare("node2", "node2", 4), HostShare("node3", "node3", 2)),
        ),
        Flavor(
            "1.5xLarge",
            12,
            3 * GIB // 2 + (32 + 72) * GIB,
            (HostShare("node2", "node2", 4), HostShare("node3", "node3", 6)),
        ),
        Flavor(
            "1.75xLarge",
            14,
            3 * GIB // 2 + (32 + 96) * GIB,
            (HostShare("node2", "node2", 4), HostShare("node3", "node3", 8)),
        ),
    ]


def test_a_host_has_all_the_workers_that_the_file_gives_it() -> None:
    here = Host(16, 256 * GIB, in_cluster=True)
    found = ladder(here, Host(16, 256 * GIB, "node2", in_cluster=True))
    assert [flavor.name for flavor in found] == [
        *("Small.16GB", "Medium.32GB", "Large.64GB", "xLarge.128GB", "1.5xLarge.192GB", "2xLarge.256GB"),
        *("3xLarge.384GB", "4xLarge.512GB"),
    ]
    assert [flavor.name for flavor in found if flavor.others] == ["3xLarge.384GB", "4xLarge.512GB"]


def test_a_host_that_is_not_listed_is_there_as_it_is(person: Person) -> None:
    person.cluster_file.write_text('[[host]]\nname = "node2"\nworkers = 64\nmemory = "1TB"\n', encoding="utf-8")
    here, found = this_host({}), flavors(person.environment)
    whole = next(flavor for flavor in found if flavor.workers == here.workers)
    assert whole == here.flavor(here.workers)
    assert all((flavor.others == "node2") == (flavor.workers > here.workers) for flavor in found)
    assert found[-1].workers == here.workers + 64


def test_the_file_limits_what_runs_here(person: Person) -> None:
    person.cluster_file.write_text(CLUSTER, encoding="utf-8")
    assert current_flavor(person.environment) == Flavor("Medium", 2, 3 * GIB // 2)
    assert asked_for("1", person.environment).memory == 3 * GIB // 4
    with pytest.raises(Diagnostic, match=r"needs node2, and \S*cluster\.toml does not say how workers are"):
        asked_for("3", person.environment)
    with pytest.raises(Diagnostic, match="have 14 workers together, not 15"):
        asked_for("15", person.environment)
    person.flavors_file.write_text('[[flavor]]\nname = "night"\nworkers = 3\n', encoding="utf-8")
    with pytest.raises(Diagnostic, match=r"but cluster\.toml gives this host 2") as raised:
        flavors(person.environment)
    assert "flavors.toml:3:1: error: " in str(raised.value)


def test_flavors_of_other_hosts_are_not_chosen_if_nothing_starts_workers_there(person: Person) -> None:
    person.cluster_file.write_text(CLUSTER, encoding="utf-8")
    known = flavors(person.environment)
    shown = person.ask("switch_model", "--list").stdout.splitlines()
    assert shown[:3] == [
        "1. Small.0.8GB  (1 worker) ",
        "2. Medium.2GB  (2 workers)  *",
        "3. Large.18GB  (4 workers, with node2) ",
    ]
    message = (
        f"error: flavor `Large.18GB` needs node2, and {person.cluster_file} does not say how workers are started there"
        "\nhint: add [cluster] with launcher and listen, or choose one that needs this host alone: Small.0.8GB, "
        "Medium.2GB\n"
    )
    for words in (("switch_model", "-M", "3"), ("smi", "device", "--add", "large")):
        done = person.ask(*words)
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert not list((person.home / ".local").rglob("*.json"))
    keep(person.environment, AcceleratorSelection(0, {0: known[2].size}))
    with pytest.raises(Diagnostic, match=r"`Large\.18GB` needs node2"):
        current_flavor(person.environment)
    assert "3. Large.18GB  (4 workers, with node2)  *" in person.ask("switch_model", "--list").stdout


def test_flavors_of_other_hosts_are_chosen_if_the_file_says_how_workers_start_there(person: Person) -> None:
    person.cluster_file.write_text(STARTED, encoding="utf-8")
    known = flavors(person.environment)
    assert "1. Small.0.8GB  (1 worker) " in person.ask("switch_model", "--list").stdout
    done = person.ask("switch_model", "-M", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert "3. Large.18GB  (4 workers, with node2)  *\n" in done.stdout
    assert current_flavor(person.environment) == known[2]
    assert "Accelerator 1 is added." in person.ask("smi", "device", "--add", "xlarge").stdout
    assert asked_for("14", person.environment) == known[-1]
    emulated = asked_for("3", {**person.environment, "MOAI_WORKERS": "triton:sm_90"})
    assert emulated.devices == ("triton:sm_90",) * 3


def test_each_worker_of_another_host_has_a_gpu_if_those_of_this_one_have(
    person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file gives this host two workers, and it has one GPU: they share it."""
    person.cluster_file.write_text(STARTED, encoding="utf-8")

    def one_gpu(environment: Mapping[str, str]) -> list[Gpu]:
        return [Gpu("NVIDIA H200", 141 * GIB, "sm_90")]

    monkeypatch.setattr(known_flavors, "usable", one_gpu)
    found = asked_for("8", person.environment)
    assert found.gpus == 1
    assert found.hosts == (HostShare("node2", "node2", 4, 4), HostShare("node3", "node3", 2, 2))
    assert found.devices == ("cuda:0", "cuda:0", "cuda:0", "cuda:1", "cuda:2", "cuda:3", "cuda:0", "cuda:1")
    on_cores = asked_for("8", {**person.environment, "MOAI_WORKERS": "cpu"})
    assert set(on_cores.devices) == {"cpu"}
    assert not any(share.gpus for share in on_cores.hosts)


def about_others(person: Person, **more: str) -> list[Finding]:
    found = findings({**person.environment, "MOAI_COMPILE": "0", **more})
    return [finding for finding in found if "node2" in finding.text or "xLarge" in finding.text]


def test_doctor_says_what_the_file_lacks_to_start_workers_elsewhere(person: Person) -> None:
    person.cluster_file.write_text(CLUSTER, encoding="utf-8")
    (finding,) = about_others(person)
    assert finding.state is FindingState.NOTE
    assert finding.text == (
        "flavors Large.18GB, xLarge.58GB, 1.5xLarge.106GB, 1.75xLarge.130GB need other hosts, "
        f"and {person.cluster_file} does not say how workers are started there"
    )
    assert finding.mend.startswith('add [cluster] to it, for example launcher = "ssh" and listen = ')


def test_doctor_names_the_hosts_and_what_starts_their_workers(person: Person) -> None:
    person.cluster_file.write_text(STARTED, encoding="utf-8")
    (finding,) = about_others(person)
    assert finding.state is FindingState.FOUND
    assert finding.text.endswith("1.75xLarge.130GB with node2, node3, by launcher ssh")
    last = doctor.first_run({**person.environment, "MOAI_FLAVOR": "7"})
    assert last.startswith("A first run would start 2 workers of ")
    assert "each, 4 workers on node2, 1 worker on node3 (0.875xLarge" in last


def test_doctor_misses_cryptography_only_with_a_cluster(person: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        assert name == "cryptography"

    def missing() -> list[Finding]:
        return [each for each in findings(person.environment) if each.text.startswith("cryptography")]

    person.cluster_file.write_text(STARTED, encoding="utf-8")
    assert not missing()
    monkeypatch.setattr(doctor, "find_spec", absent)
    text = f"cryptography is not installed, which [cluster] in {person.cluster_file} needs"
    assert missing() == [Finding(FindingState.MISSING, text, "pip install 'moaic[cluster]'")]
    person.cluster_file.write_text(CLUSTER, encoding="utf-8")
    assert not missing()


def test_doctor_points_at_a_broken_table_of_the_cluster(person: Person) -> None:
    person.cluster_file.write_text(STARTED.replace('"ssh"', '"telnet"'), encoding="utf-8")
    (finding,) = [each for each in findings(person.environment) if "launcher" in each.text]
    assert finding.state is FindingState.MISSING
    assert finding.text.startswith(f"{person.cluster_file}:3: [cluster] needs a launcher: one of connect, ssh, ")


def test_a_program_says_which_flavor_to_take_instead(person: Person) -> None:
    person.cluster_file.write_text(CLUSTER, encoding="utf-8")
    program = person.start('import torch\ntorch.ones(2).to("moai")', MOAI_FLAVOR="xLarge", MOAI_LOG="warning")
    _, said = program.communicate()
    assert program.returncode == 1
    first, second = said.splitlines()
    assert "error: flavor `xLarge.58GB` needs node2, node3, and " in first
    assert first.endswith("/cluster.toml does not say how workers are started there")
    assert second.startswith("hint: add [cluster] with launcher and listen, or choose one that needs this host alone: ")
    assert second.endswith(": Small.0.8GB, Medium.2GB")


def test_the_files_of_the_documentation_give_the_list_that_it_shows(person: Person) -> None:
    page = [block for block in blocks(ROOT / "docs" / "tutorial" / "devices.md") if block.language in ("toml", "text")]
    own, cluster, shown = (block.text for block in page)
    person.cluster_file.write_text(cluster, encoding="utf-8")
    listed = person.ask("switch_model", "--list").stdout.splitlines()
    assert [each.rstrip() for each in listed if each] == shown.splitlines()
    person.cluster_file.unlink()
    person.flavors_file.write_text(own.replace("8GB", "1GB"), encoding="utf-8")
    assert flavors(person.environment)[-1] == Flavor("night", 2, GIB)


CHOSEN = """
import torch
from moaic.runtime.controller.session import SESSION
print(SESSION.accelerator().flavor, SESSION.flavor().name)
"""


def test_a_program_has_the_workers_that_the_file_gives_this_host(person: Person) -> None:
    person.cluster_file.write_text(CLUSTER.replace("workers = 2", "workers = 3"), encoding="utf-8")
    out, _ = person.start(CHOSEN).communicate()
    assert out.split() == ["3", "0.375xLarge.2GB"]


def test_this_host_is_known_by_its_names(person: Person) -> None:
    name = os.uname().nodename
    for mine in ("localhost", name, name.partition(".")[0]):
        person.cluster_file.write_text(f'[[host]]\nname = "{mine}"\nworkers = 1\nmemory = "1GB"\n', encoding="utf-8")
        assert [host.is_here for host in listed_hosts(person.cluster_file, 8 * GIB)] == [True]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ('[[host]]\nname = "a"\nworkers = 1\nmemory = 1GB\n', ":4:11", "Expected newline"),
        ('[[host]]\nname = "a"\nworkers = 1\n', ":1:3", "host `a` needs memory"),
        ('[[host]]\nname = "a"\nworkers = 1.5\nmemory = "1GB"\n', ":3:1", "host `a` needs workers"),
        ('[[host]]\nname = "localhost"\nworkers = 1\nmemory = "90TB"\n', ":4:1", "this host has"),
        ('[[host]]\nname = "a"\nworkers = 1\nmemory = "1GB"\nport = 22\n', ":5:1", "has no `port`"),
        ('[[flavor]]\nname = "a"\n', ":1:3", "`flavor` is no list of tables"),
        (CLUSTER + CLUSTER, ":18:1", "host `node2` is listed twice"),
    ],
)
def test_a_broken_file_is_named_with_its_line(person: Person, text: str, place: str, message: str) -> None:
    person.cluster_file.write_text(text, encoding="utf-8")
    with pytest.raises(Diagnostic, match=message) as raised:
        flavors(person.environment)
    assert f"cluster.toml{place}: error: " in str(raised.value)
