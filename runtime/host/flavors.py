"""Flavors: the sizes that an accelerator can have. Each is a number of workers and their memory together.

The workers of a host share its memory. A flavor of the whole host has all of it; more workers than that do not have
more. In a cluster, a flavor fills this host first, then the others in the order of `cluster.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster import ClusterHost, listed_hosts
from moaic.runtime.host.cluster_settings import cluster_settings
from moaic.runtime.host.cores import cores
from moaic.runtime.host.folders import cluster_file, config_folder
from moaic.runtime.host.gpus import CPU, usable
from moaic.runtime.host.memory import host_bytes
from moaic.runtime.host.toml_tables import TomlTable, read_tables
from moaic.runtime.host.worker_kinds import asked_device
from moaic.text.units import GIB

SIZES: Final[Mapping[str, int]] = {"Small": 1, "Medium": 2, "Large": 4, "xLarge": 8}
"""Workers of the smallest flavors; larger ones are named by their multiple of an xLarge."""

MULTIPLES: Final = (1.5, 2, 3, 4, 6, 8, 12, 24, 48)

MOST_WORKERS: Final = 8
"""Most workers of the default flavor of a host without GPUs; a host of fewer cores can have as many, too."""

EXAMPLE: Final = 'a flavor reads [[flavor]] and, below, name = "night", workers = 4 and perhaps memory = "16GB"'


class HostShare(NamedTuple):
    """What another host has of a flavor's workers."""

    name: str
    address: str
    workers: int
    gpus: int = 0
    """Number of GPUs that it needs for them, one each; 0 if they compute on cores."""
    device: str = CPU
    """Device of workers on cores."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker."""
        return _devices(self.workers, self.gpus, self.device)


@dataclass(frozen=True, slots=True)
class Flavor:
    """A size of an accelerator."""

    size: str
    workers: int
    memory: int
    """Bytes of all workers together."""
    hosts: tuple[HostShare, ...] = ()
    """The other hosts that have some of the workers; the first ones are of this host."""
    gpus: int = 0
    """Number of GPUs, whose memory it then is; 0 if workers compute on cores of the host."""
    device: str = CPU
    """Device of workers on cores: `cpu`, or a GPU that they emulate."""

    @property
    def others(self) -> str:
        """The names of the other hosts: `node2, node3`; empty if it needs this one alone."""
        return ", ".join(share.name for share in self.hosts)

    @property
    def here(self) -> int:
        """The number of workers of this host."""
        return self.workers - sum(share.workers for share in self.hosts)

    @property
    def name(self) -> str:
        """Size and memory, as lists show them: `Large.256GB`."""
        gib = self.memory / GIB
        return f"{self.size}.{gib:.0f}GB" if gib >= 1 else f"{self.size}.{gib:.1f}GB"

    @property
    def per_worker(self) -> int:
        """The bytes of memory of one worker."""
        return self.memory // self.workers

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each worker; those of this host share GPUs if there are fewer of them."""
        return (*self.devices_here, *(device for share in self.hosts for device in share.devices))

    @property
    def devices_here(self) -> tuple[str, ...]:
        """The device of each worker of this host."""
        return _devices(self.here, self.gpus, self.device)


@dataclass(frozen=True, slots=True)
class Host:
    """The resources of one host, of which flavors are made."""

    cores: int
    """Cores, or GPUs if it has any; for a host of a cluster, its number of workers."""
    memory: int
    name: str = "localhost"
    address: str = "localhost"
    in_cluster: bool = False
    """Whether other hosts have workers, too; then a host has no more workers than `cores`."""
    gpus: int = 0
    """Number of GPUs that workers compute on; if not 0, `memory` is theirs. Other hosts have one for each worker."""
    device: str = CPU
    """Device of workers on cores."""

    @property
    def workers(self) -> int:
        """The number of workers of the flavor that takes the whole host, which is the default flavor."""
        return self.cores if self.in_cluster or self.gpus else min(self.cores, MOST_WORKERS)

    @property
    def most(self) -> int:
        """The number of workers of its largest usual size."""
        return self.cores if self.in_cluster or self.gpus else max(self.cores, MOST_WORKERS)

    def share(self, workers: int) -> HostShare:
        """So many workers of this host, as another one."""
        return HostShare(self.name, self.address, workers, min(workers, self.gpus), self.device)

    def flavor(self, workers: int) -> Flavor:
        """The flavor of this number of workers, with their share of the host's memory."""
        share = min(workers, self.workers) / self.workers
        gpus = min(workers, self.gpus)
        return Flavor(_size(workers), workers, int(share * self.memory), gpus=gpus, device=self.device)


def this_host(environment: Mapping[str, str]) -> Host:
    """The host without regard to `cluster.toml`: one worker per GPU, or per core without GPUs or with MOAI_WORKERS.

    Raises Diagnostic for an invalid MOAI_WORKERS.
    """
    device = asked_device(environment)
    found = usable(environment) if device is None else []
    if not found:
        return Host(cores(), host_bytes(), device=device or CPU)
    return Host(len(found), len(found) * min(gpu.memory for gpu in found), gpus=len(found))


def hosts(environment: Mapping[str, str]) -> list[Host]:
    """This host, as listed in `cluster.toml` or as it is, then the other hosts of that file, if there is one.

    Raises Diagnostic for an invalid file.
    """
    here = this_host(environment)
    listed = listed_hosts(cluster_file(environment), here.memory)
    if not listed:
        return [here]
    ours = [_host(each, min(each.workers, here.gpus), here.device) for each in listed if each.is_here]
    ours = ours or [replace(here, cores=here.workers, in_cluster=True)]
    others = [each for each in listed if not each.is_here]
    return [*ours, *(_host(each, each.workers if here.gpus else 0, here.device) for each in others)]


def ladder(here: Host, *others: Host) -> list[Flavor]:
    """The usual sizes that this host can have and the one that takes all of it; then those that need other hosts."""
    usual = [*SIZES.values(), *(int(MOST_WORKERS * multiple) for multiple in MULTIPLES)]
    whole = sum(host.workers for host in (here, *others))
    counts = sorted({*(n for n in usual if n <= max(here.most, whole)), here.workers, whole})
    return [here.flavor(n) if n <= here.most else _spread(n, here, *others) for n in counts]


def flavors(environment: Mapping[str, str]) -> list[Flavor]:
    """All flavors: the ladder, then the user's own. Raises Diagnostic for an invalid file."""
    here, *others = hosts(environment)
    own = [_own(table, here) for table in read_tables(config_folder(environment) / "flavors.toml", "flavor", EXAMPLE)]
    taken = {flavor.size.lower() for flavor in own}
    return [*(flavor for flavor in ladder(here, *others) if flavor.size.lower() not in taken), *own]


def named(text: str, known: Sequence[Flavor]) -> Flavor | None:
    """The flavor of a name, with or without its memory; case is ignored."""
    wanted = text.strip().lower()
    return next((flavor for flavor in known if wanted in (flavor.name.lower(), flavor.size.lower())), None)


def asked_for(text: str, environment: Mapping[str, str]) -> Flavor:
    """The flavor given to MOAI_FLAVOR or `torch.moai.set_flavor`: a name or a number. Raises Diagnostic."""
    known = flavors(environment)
    found = named(text, known)
    if found is None and text.isdecimal() and int(text) >= 1:
        found = _counted(int(text), hosts(environment))
    if found is None:
        names = ", ".join(flavor.name for flavor in known)
        raise Diagnostic(
            f"there is no flavor `{text}`", hint=f"give a number of workers, at least 1, or one of {names}"
        )
    return startable(found, known, environment)


def startable(flavor: Flavor, known: Sequence[Flavor], environment: Mapping[str, str]) -> Flavor:
    """The flavor itself. Raises Diagnostic if it needs other hosts, and nothing says how to start workers there."""
    if not flavor.hosts:
        return flavor
    here = "choose one that needs this host alone: " + ", ".join(each.name for each in known if not each.hosts)
    path = cluster_file(environment)
    if cluster_settings(path) is None:
        raise Diagnostic(
            f"flavor `{flavor.name}` needs {flavor.others}, and {path} does not say how workers are started there",
            hint=f"add [cluster] with launcher and listen, or {here}",
        )
    return flavor


def _devices(workers: int, gpus: int, device: str) -> tuple[str, ...]:
    return tuple(f"cuda:{index % gpus}" if gpus else device for index in range(workers))


def _size(workers: int) -> str:
    usual = {count: size for size, count in SIZES.items()}
    return usual.get(workers, f"{workers / MOST_WORKERS:g}xLarge")


def _host(listed: ClusterHost, gpus: int, device: str) -> Host:
    return Host(listed.workers, listed.memory, listed.name, listed.address, True, gpus, device)


def _counted(workers: int, found: Sequence[Host]) -> Flavor:
    """The flavor of a number of workers; in a cluster, of at most those of all hosts. Raises Diagnostic."""
    here, *others = found
    return _spread(workers, here, *others) if here.in_cluster and workers > here.most else here.flavor(workers)


def _spread(workers: int, here: Host, *others: Host) -> Flavor:
    """The flavor of workers that fill one host after the other, with their share of memory. Raises Diagnostic."""
    left, memory, used = workers, 0, list[HostShare]()
    for host in (here, *others):
        taken = min(left, host.workers)
        left -= taken
        memory += host.memory * taken // host.workers
        used += [host.share(taken)] if taken else []
    if left:
        raise Diagnostic(
            f"the hosts of cluster.toml have {workers - left} workers together, not {workers}",
            hint=f"choose {here.workers} or fewer",
        )
    return Flavor(_size(workers), workers, memory, tuple(used[1:]), min(workers, here.gpus), here.device)


def _own(table: TomlTable, here: Host) -> Flavor:
    """A flavor that the user wrote into `flavors.toml`."""
    table.check_keys(("name", "workers", "memory"))
    name, workers = table.name(), table.workers()
    if here.in_cluster and workers > here.workers:
        raise Diagnostic(
            f"flavor `{name}` has {workers} workers, but cluster.toml gives this host {here.workers}",
            table.place("workers"),
        )
    has_memory = "memory" in table.values
    usual = here.flavor(workers)
    return replace(usual, size=name, memory=table.memory(here.memory) if has_memory else usual.memory)
