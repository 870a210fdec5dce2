"""The report of `moaic cluster check`: a line for each host, the links between them, and what mends each problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import EXAMPLE, ClusterSettings, cluster_settings
from moaic.runtime.host.cpp_compiler import MEND_COMPILER, MEND_HEADER
from moaic.runtime.host.env_flags import may_compile
from moaic.runtime.host.flavors import Host, hosts
from moaic.runtime.host.folders import cluster_file
from moaic.runtime.launch.cluster_check import CheckedCluster, check_cluster
from moaic.runtime.launch.host_facts import differences, threads, unequal_threads, unlike_gpus
from moaic.runtime.launch.launchers.launcher import Say
from moaic.runtime.protocol.host_messages import FolderState, HostFacts, HostState, MeasuredLink
from moaic.text.tables import aligned_table, left, right
from moaic.text.units import gib

COLUMNS = (
    *left("host", "reached", "versions", "CPU"),
    *right("cores", "workers", "threads", "memory", "in cluster.toml"),
    *left("compiler", "folder"),
)

UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """What is checked: the hosts of `cluster.toml`, this one first, and a folder that all should see."""

    hosts: Sequence[Host]
    """With the names that they were given, once they are."""
    settings: ClusterSettings
    folder: Path
    needs_folder: bool
    """Whether a folder that is not shared is a problem; otherwise it is a warning."""
    needs_compiler: bool

    @property
    def here(self) -> str:
        """The name of this host."""
        return self.hosts[0].name


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What was asked, what was found, and what follows."""

    request: CheckRequest
    found: CheckedCluster
    problems: Sequence[Diagnostic]
    warnings: Sequence[Diagnostic]


def requested(environment: Mapping[str, str], folder: Path | None) -> CheckRequest:
    """A check of the user's cluster. Raises Diagnostic if there is none."""
    path = cluster_file(environment)
    settings = cluster_settings(path)
    if settings is None:
        what = "has no table [cluster]" if path.exists() else "does not exist"
        raise Diagnostic(f"there is no cluster to check: {path} {what}", hint=f"describe your hosts there, {EXAMPLE}")
    known = hosts(environment)
    if len(known) == 1:
        raise Diagnostic(f"there is no cluster to check: {path} lists no other host", hint="add a [[host]] for each")
    return CheckRequest(known, settings, folder or Path.cwd(), folder is not None, may_compile(environment))


def checked(request: CheckRequest, say: Say) -> ClusterReport:
    """Check the cluster. Raises Diagnostic if no host can be asked at all."""
    others = [host.share(host.workers) for host in request.hosts[1:]]
    return judged(request, check_cluster(request.here, others, request.settings, request.folder, say))


def judged(request: CheckRequest, found: CheckedCluster) -> ClusterReport:
    """What follows from what was found."""
    request = _placed(request, found.names)
    problems = [
        *found.problems.values(),
        *_unlike(request, found),
        *(problem for host in request.hosts for problem in _lacks(request, host, found.states.get(host.name))),
        *_unreached(found.links),
        *_unknown(found),
    ]
    warnings = list(_unequal(request, found))
    (problems if request.needs_folder else warnings).extend(_unshared(request, found))
    return ClusterReport(request, found, problems, warnings)


def _placed(request: CheckRequest, names: Sequence[str]) -> CheckRequest:
    """The request by the names under which hosts were found."""
    hosts = [replace(host, name=name) for host, name in zip(request.hosts, names, strict=True)]
    return replace(request, hosts=hosts)


def to_text(report: ClusterReport) -> str:
    """What `moaic cluster check` prints."""
    found, names = report.found, [host.name for host in report.request.hosts]
    ours = found.facts[report.request.here]
    gpus = f", {', '.join(ours.gpus)}" if ours.gpus else ""
    lines = [f"This host: moaic {ours.moaic}, PyTorch {ours.torch}, Python {ours.python}, {ours.cpu}{gpus}", ""]
    lines += aligned_table(COLUMNS, [_row(report, host) for host in report.request.hosts])
    if found.links:
        listening = [name for name in names if any(name in pair for pair in found.links)]
        rates = {pair: f"{link.rate / 1e6:.0f}" for pair, link in found.links.items() if not link.error}
        times = {pair: f"{link.round_trip * 1e3:.2f}" for pair, link in found.links.items() if not link.error}
        lines += ["", *_matrix("MB/s from, to", listening, rates)]
        lines += ["", *_matrix("round trip [ms]", listening, times)]
    lines += ["", *_listed("problem", report.problems), *_listed("warning", report.warnings)]
    return "\n".join([*lines, *([] if report.problems else ["A program can use all hosts."])])


def to_data(report: ClusterReport) -> dict[str, Any]:
    """The same as plain data, in bytes and seconds."""
    found = report.found
    return {
        "hosts": [_host_data(host, found) for host in report.request.hosts],
        "links": [{"from": one, "to": other, **asdict(link)} for (one, other), link in found.links.items()],
        "problems": [{"message": each.message, "hint": each.hint} for each in report.problems],
        "warnings": [{"message": each.message, "hint": each.hint} for each in report.warnings],
    }


def _host_data(host: Host, found: CheckedCluster) -> dict[str, Any]:
    facts, state = found.facts.get(host.name), found.states.get(host.name)
    return {
        "name": host.name,
        "workers": host.workers,
        "stated_memory": host.memory,
        "facts": None if facts is None else asdict(facts),
        "state": None if state is None else asdict(state),
    }


def _row(report: ClusterReport, host: Host) -> tuple[str, ...]:
    here = report.request.here
    ours, theirs = report.found.facts[here], report.found.facts.get(host.name)
    stated = gib(host.memory)
    if theirs is None:
        unknown = [UNKNOWN] * 3
        return (host.name, "no", UNKNOWN, UNKNOWN, UNKNOWN, str(host.workers), UNKNOWN, UNKNOWN, stated, *unknown[:2])
    reached = "here" if host.name == here else "yes"
    alike = _versions(theirs) == _versions(ours)
    each = str(threads(theirs, host.workers))
    words = ("same" if alike else "other", "same" if theirs.cpu == ours.cpu else "other", str(theirs.cores))
    return (
        host.name,
        reached,
        *words,
        str(host.workers),
        each,
        *_found_there(host, report.found.states.get(host.name), stated),
    )


def _versions(facts: HostFacts) -> tuple[object, ...]:
    return facts.version, facts.moaic, facts.torch, facts.python


def _found_there(host: Host, state: HostState | None, stated: str) -> tuple[str, str, str, str]:
    if state is None:
        return UNKNOWN, stated, UNKNOWN, UNKNOWN
    return gib(_memory(host, state)), stated, Path(state.compiler).name or "none", state.folder


def _memory(host: Host, state: HostState) -> int:
    """Bytes of what the host's workers compute on."""
    return sum(state.gpu_memory[: host.gpus]) if host.gpus else state.memory


def _matrix(title: str, names: Sequence[str], cells: Mapping[tuple[str, str], str]) -> list[str]:
    """A table from hosts, one a row, to hosts, one a column."""
    rows = [(one, *("" if one == other else cells.get((one, other), "none") for other in names)) for one in names]
    return aligned_table((*left(title), *right(*names)), rows)


def _listed(kind: str, found: Iterable[Diagnostic]) -> Iterator[str]:
    """Each message with what mends it."""
    for each in found:
        yield f"{kind:<9}{each.message}"
        if each.hint:
            yield f"         fix: {each.hint}"


def _unlike(request: CheckRequest, found: CheckedCluster) -> Iterator[Diagnostic]:
    """Versions, CPUs and GPUs of other hosts."""
    for host in request.hosts[1:]:
        if host.name in found.facts:
            theirs, ours = found.facts[host.name], found.facts[request.here]
            yield from differences(host.name, theirs, ours)
            yield from unlike_gpus(host.name, (theirs, host.gpus), (ours, request.hosts[0].gpus))


def _lacks(request: CheckRequest, host: Host, state: HostState | None) -> Iterator[Diagnostic]:
    """What a host should have and does not."""
    if state is None:
        return
    if (memory := _memory(host, state)) < host.memory:
        yield Diagnostic(
            f"host `{host.name}` has {gib(memory)} of memory, and cluster.toml says {gib(host.memory)}",
            hint=f"set memory of this [[host]] to at most {gib(memory)}, less what others use there",
        )
    if request.needs_compiler and not state.compiler:
        yield Diagnostic(f"host `{host.name}` has no C++ compiler", hint=f"there: {MEND_COMPILER}")
    if request.needs_compiler and not state.has_header:
        yield Diagnostic(f"host `{host.name}` has no headers of Python", hint=f"there: {MEND_HEADER}")
    if state.words:
        hint = "set address of this [[host]] in cluster.toml to one of that host's own"
        yield Diagnostic(f"host `{host.name}`: {state.words}", hint=hint)


def _unshared(request: CheckRequest, found: CheckedCluster) -> Iterator[Diagnostic]:
    """Hosts on which workers cannot write a checkpoint where this host sees it."""
    where = request.folder.absolute()
    apart = [name for name, state in found.states.items() if state.folder is FolderState.APART]
    if apart:
        hint = "checkpoints by workers need a folder that all hosts have under one path: mount one, and give --folder"
        yield Diagnostic(f"{where} is no folder of this host on {_quoted(apart)}", hint=hint)
    read_only = [name for name, state in found.states.items() if state.folder is FolderState.READ_ONLY]
    if read_only:
        yield Diagnostic(f"{where} cannot be written on {_quoted(read_only)}", hint="let the account there write to it")


def _unequal(request: CheckRequest, found: CheckedCluster) -> Iterator[Diagnostic]:
    """Hosts whose workers have other numbers of threads than those of this one."""
    here = request.hosts[0]
    ours = found.facts[here.name], here.workers
    for host in request.hosts[1:]:
        theirs = found.facts.get(host.name)
        if theirs is not None and (words := unequal_threads(host.name, (theirs, host.workers), ours)):
            yield Diagnostic(words)


def _unreached(links: Mapping[tuple[str, str], MeasuredLink]) -> Iterator[Diagnostic]:
    """Which hosts cannot connect to which, those that one cannot reach for the same reason together."""
    failed: dict[tuple[str, str], list[str]] = {}
    for (one, other), link in links.items():
        if link.error:
            failed.setdefault((one, link.error), []).append(other)
    for (one, reason), others in failed.items():
        yield Diagnostic(
            f"workers of host `{one}` cannot connect to those of {_quoted(others)}: {reason}",
            hint="let firewalls pass the TCP ports of net.ipv4.ip_local_port_range (32768 to 60999) between these "
            "hosts, or correct their addresses in cluster.toml",
        )


def _unknown(found: CheckedCluster) -> Iterator[Diagnostic]:
    """What was not found of hosts, although no other problem says why: no host is well for want of an answer."""
    ours, hint = found.facts[found.names[0]], "check again, and report it if it stays"
    left = [name for name in found.names if name not in found.problems]
    # Of a host with other messages a problem tells already.
    left = [name for name in left if name not in found.facts or found.facts[name].version == ours.version]
    silent = [name for name in left if name not in found.facts or name not in found.states]
    for name in silent:
        yield Diagnostic(f"host `{name}` has not told what it has", hint=hint)
    listening = [name for name in left if name not in silent and found.states[name].port]
    for pair in permutations(listening, 2):
        if pair not in found.links:
            yield Diagnostic(f"the link from host `{pair[0]}` to `{pair[1]}` was not measured", hint=hint)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
