"""The report of a cluster check, from findings that are made up: no host is asked."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings, LauncherName
from moaic.runtime.host.flavors import Host
from moaic.runtime.launch.cluster_check import CheckedCluster
from moaic.runtime.protocol.host_messages import FolderState, HostFacts, HostState, MeasuredLink
from moaic.text.units import GIB
from moaic.tools.cluster_report import CheckRequest, judged, to_data, to_text

NAMES = ("localhost", "node2", "node3")

FACTS = HostFacts(3, "0.1.0", "2.13.0", "3.11", "x86_64 fma avx2", 8)

STATE = HostState(64 * GIB, (), "/usr/bin/g++", True, FolderState.SHARED, 40000, "")

LINK = MeasuredLink(8e-5, 8e8, "")

REQUEST = CheckRequest(
    [Host(2, 32 * GIB, name, name, in_cluster=True) for name in NAMES],
    ClusterSettings(LauncherName.CONNECT, "10.0.0.1"),
    Path("/shared"),
    needs_folder=True,
    needs_compiler=True,
)

WELL = CheckedCluster(
    NAMES,
    dict.fromkeys(NAMES, FACTS),
    dict.fromkeys(NAMES, STATE),
    {(one, other): LINK for one in NAMES for other in NAMES if one != other},
    {},
)

ALL_WELL = """\
This host: moaic 0.1.0, PyTorch 2.13.0, Python 3.11, x86_64 fma avx2

host       reached  versions  CPU   cores  workers  threads    memory  in cluster.toml  compiler  folder
localhost  here     same      same      8        2        4  64.0 GiB         32.0 GiB  g++       shared
node2      yes      same      same      8        2        4  64.0 GiB         32.0 GiB  g++       shared
node3      yes      same      same      8        2        4  64.0 GiB         32.0 GiB  g++       shared

MB/s from, to  localhost  node2  node3
localhost                   800    800
node2                800           800
node3                800    800

round trip [ms]  localhost  node2  node3
localhost                    0.08   0.08
node2                 0.08          0.08
node3                 0.08   0.08

A program can use all hosts."""


def of_node2(state: HostState = STATE, facts: HostFacts = FACTS) -> CheckedCluster:
    """A cluster whose second host is like that."""
    return replace(WELL, states={**WELL.states, "node2": state}, facts={**WELL.facts, "node2": facts})


def problems(found: CheckedCluster, request: CheckRequest = REQUEST) -> list[str]:
    return [each.message for each in judged(request, found).problems]


def test_all_is_well() -> None:
    assert to_text(judged(REQUEST, WELL)) == ALL_WELL


def test_a_host_that_has_not_come_has_a_line() -> None:
    found = CheckedCluster(
        NAMES,
        dict.fromkeys(NAMES[:2], FACTS),
        dict.fromkeys(NAMES[:2], STATE),
        {pair: LINK for pair in WELL.links if "node3" not in pair},
        {"node3": Diagnostic("nobody on `node3` answered", hint="try there")},
    )
    text = to_text(judged(REQUEST, found))
    assert "node3      no       ?         ?         ?        2        ?         ?         32.0 GiB" in text
    assert "MB/s from, to  localhost  node2\n" in text
    assert text.endswith("\n\nproblem  nobody on `node3` answered\n         fix: try there")


def test_every_host_that_has_not_come_has_its_own_advice() -> None:
    absent = {name: Diagnostic(f"nobody on `{name}` answered", hint=f"start {name}") for name in NAMES[1:]}
    text = to_text(judged(REQUEST, replace(WELL, problems=absent)))
    assert text.endswith(
        "problem  nobody on `node2` answered\n         fix: start node2\n"
        "problem  nobody on `node3` answered\n         fix: start node3"
    )


def test_hosts_are_judged_by_the_names_that_they_were_given() -> None:
    names = ("localhost", "n1", "n2")
    found = CheckedCluster(
        names,
        dict.fromkeys(names, FACTS),
        {**dict.fromkeys(names, STATE), "n2": replace(STATE, memory=GIB)},
        dict.fromkeys(permutations(names, 2), LINK),
        {},
    )
    report = judged(REQUEST, found)
    assert "\nn1         yes      same " in to_text(report)
    assert [host["name"] for host in to_data(report)["hosts"]] == list(names)
    assert [each.message for each in report.problems] == [
        "host `n2` has 1.0 GiB of memory, and cluster.toml says 32.0 GiB"
    ]


def test_what_was_not_found_is_a_problem() -> None:
    silent = "host `node2` has not told what it has"
    assert problems(replace(WELL, facts={name: FACTS for name in NAMES if name != "node2"})) == [silent]
    assert problems(replace(WELL, states={name: STATE for name in NAMES if name != "node2"})) == [silent]
    links = {pair: LINK for pair in WELL.links if pair != ("node2", "node3")}
    assert problems(replace(WELL, links=links)) == ["the link from host `node2` to `node3` was not measured"]


def test_every_version_that_differs_is_a_problem() -> None:
    assert problems(of_node2(facts=replace(FACTS, torch="2.12.0", python="3.12", cpu="aarch64 sve"))) == [
        "host `node2` has PyTorch 2.12.0, this one 2.13.0",
        "host `node2` has Python 3.12, this one 3.11",
        "host `node2` has another kind of CPU (aarch64 sve) than this one (x86_64 fma avx2)",
    ]


def test_other_numbers_of_threads_are_a_warning() -> None:
    report = judged(REQUEST, of_node2(facts=replace(FACTS, cores=4)))
    assert not report.problems
    assert [each.message.partition(":")[0] for each in report.warnings] == [
        "Workers of host node2 have 2 threads each, those of this one 4"
    ]


def test_what_a_host_lacks_is_a_problem() -> None:
    state = HostState(16 * GIB, (), "", False, FolderState.READ_ONLY, 0, "workers cannot listen on 10.0.0.9")
    assert problems(of_node2(state)) == [
        "host `node2` has 16.0 GiB of memory, and cluster.toml says 32.0 GiB",
        "host `node2` has no C++ compiler",
        "host `node2` has no headers of Python",
        "host `node2`: workers cannot listen on 10.0.0.9",
        "/shared cannot be written on `node2`",
    ]


def test_gpus_of_other_hosts() -> None:
    gpus = ("NVIDIA H200",) * 4
    request = replace(REQUEST, hosts=[replace(host, gpus=2, memory=256 * GIB) for host in REQUEST.hosts])
    well = replace(
        WELL,
        facts=dict.fromkeys(NAMES, replace(FACTS, gpus=gpus)),
        states=dict.fromkeys(NAMES, replace(STATE, gpu_memory=(141 * GIB,) * 4)),
    )
    assert not problems(well, request)
    text = to_text(judged(request, well))
    assert text.startswith("This host: moaic 0.1.0, PyTorch 2.13.0, Python 3.11, x86_64 fma avx2, NVIDIA H200, ")
    assert " 282.0 GiB        256.0 GiB " in text, "of the GPUs that workers use"

    def with_gpus(*names: str) -> list[str]:
        return problems(replace(well, facts={**well.facts, "node2": replace(FACTS, gpus=names)}), request)

    needs = "for 2 workers: each of another host needs one of its own"
    assert with_gpus() == [f"host `node2` has no GPU {needs}"]
    assert with_gpus("NVIDIA H200") == [f"host `node2` has 1 GPU {needs}"]
    other = "host `node2` has NVIDIA H200 and NVIDIA A100, this one NVIDIA H200: GPUs must be of one kind"
    assert with_gpus("NVIDIA H200", "NVIDIA A100") == [other]
    mixed = replace(well, facts=dict.fromkeys(NAMES, replace(FACTS, gpus=("NVIDIA H200", "NVIDIA A100"))))
    assert len(problems(mixed, request)) == 2, "also where both hosts are mixed alike"
    triton = replace(well, facts={**well.facts, "node2": replace(FACTS, gpus=gpus, triton="3.7.0")})
    assert problems(triton, request) == ["host `node2` has Triton 3.7.0, this one nowhere"]
    assert not with_gpus("NVIDIA H200", "NVIDIA H200", "NVIDIA A100"), "of those that workers use"
    assert not problems(replace(well, facts={**well.facts, "node2": FACTS})), "workers on cores"


def test_programs_that_do_not_compile_need_no_compiler() -> None:
    assert not problems(of_node2(replace(STATE, compiler="", has_header=False)), replace(REQUEST, needs_compiler=False))


def test_a_folder_that_nobody_named_need_not_be_shared() -> None:
    found = of_node2(replace(STATE, folder=FolderState.APART))
    assert problems(found) == ["/shared is no folder of this host on `node2`"]
    report = judged(replace(REQUEST, needs_folder=False), found)
    assert not report.problems
    assert [each.message for each in report.warnings] == ["/shared is no folder of this host on `node2`"]


def test_links_that_fail_alike_are_one_problem_of_the_host_that_connects() -> None:
    links = {pair: replace(LINK, error="timed out") if pair[0] == "node2" else LINK for pair in WELL.links}
    report = judged(REQUEST, replace(WELL, links=links))
    assert [each.message for each in report.problems] == [
        "workers of host `node2` cannot connect to those of `localhost`, `node3`: timed out"
    ]
    assert "node2               none          none" in to_text(report)


def test_the_data_has_all_that_the_text_has() -> None:
    data = to_data(judged(REQUEST, of_node2(facts=replace(FACTS, torch="2.12.0"))))
    assert [host["name"] for host in data["hosts"]] == list(NAMES)
    assert data["hosts"][1]["facts"]["torch"] == "2.12.0"
    assert data["links"][0] == {"from": "localhost", "to": "node2", "round_trip": 8e-5, "rate": 8e8, "error": ""}
    assert data["problems"] == [
        {"message": "host `node2` has PyTorch 2.12.0, this one 2.13.0", "hint": "install the same PyTorch"}
    ]
