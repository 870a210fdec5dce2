"""Flavors: the sizes that an accelerator can have, each with its workers and the memory that these have together.

Workers of one host share its memory: those that a whole host has divide all of it, and more of them have no more.
A cluster's flavors fill this host first, and the others in the order of `cluster.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster import ClusterHost, listed_hosts
from moaic.runtime.host.cores import cores
from moaic.runtime.host.folders import config_folder
from moaic.runtime.host.gpus import CPU, usable
from moaic.runtime.host.memory import host_bytes
from moaic.runtime.host.toml_tables import TomlTable, read_tables
from moaic.text.units import GIB

SIZES: Final[Mapping[str, int]] = {"Small": 1, "Medium": 2, "Large": 4, "xLarge": 8}
"""Workers of the smallest flavors; larger ones are named by how often they hold an xLarge."""

MULTIPLES: Final = (1.5, 2, 3, 4, 6, 8, 12, 24, 48)

MOST_WORKERS: Final = 8
"""Workers started when nobody says how many, and carried even by a host of fewer cores."""

EXAMPLE: Final = 'a flavor reads [[flavor]] and, below, name = "night", workers = 4 and perhaps memory = "16GB"'


@dataclass(frozen=True, slots=True)
class Flavor:
    """A size of an accelerator."""

    size: str
    workers: int
    memory: int
    """Bytes of all workers together."""
    others: str = ""
    """`node2, node3`: the other hosts that it needs, where no workers can be started yet."""
    gpus: int = 0
    """Whose memory it is; 0 where workers compute on the cores of the host."""

    @property
    def name(self) -> str:
        """`Large.256GB`: what lists show."""
        gib = self.memory / GIB
        return f"{self.size}.{gib:.0f}GB" if gib >= 1 else f"{self.size}.{gib:.1f}GB"

    @property
    def per_worker(self) -> int:
        """Bytes of one worker."""
        return self.memory // self.workers

    @property
    def devices(self) -> tuple[str, ...]:
        """That of each worker: a GPU of its own as far as there are as many."""
        return tuple(f"cuda:{rank % self.gpus}" if self.gpus else CPU for rank in range(self.workers))


@dataclass(frozen=True, slots=True)
class Host:
    """What flavors are made from."""

    cores: int
    """Or, of a host of a cluster, as many workers as it has."""
    memory: int
    name: str = "localhost"
    in_cluster: bool = False
    """Where others have workers too, no host has more than it can compute with."""
    gpus: int = 0
    """Those that workers compute on, whose memory it then is; `cores` is as many."""

    @property
    def workers(self) -> int:
        """How many workers take the whole host, and are started when nobody says how many."""
        return self.cores if self.in_cluster or self.gpus else min(self.cores, MOST_WORKERS)

    @property
    def most(self) -> int:
        """How many workers the largest of its usual sizes has."""
        return self.cores if self.in_cluster or self.gpus else max(self.cores, MOST_WORKERS)

    def flavor(self, workers: int) -> Flavor:
        """Some workers with their share of the host's memory."""
        share = min(workers, self.workers) / self.workers
        return Flavor(_size(workers), workers, int(share * self.memory), gpus=min(workers, self.gpus))


def this_host(environment: Mapping[str, str]) -> Host:
    """As it is, whatever `cluster.toml` says: a worker for each GPU, or for each core where there is none."""
    found = usable(environment)
    if not found:
        return Host(cores(), host_bytes())
    return Host(len(found), len(found) * min(gpu.memory for gpu in found), gpus=len(found))


def hosts(environment: Mapping[str, str]) -> list[Host]:
    """This host alone; with a `cluster.toml` this host as it is listed, or as it is, and then the others of the file.

    Raises Diagnostic for a broken file.
    """
    here = this_host(environment)
    listed = listed_hosts(config_folder(environment) / "cluster.toml", here.memory)
    if not listed:
        return [here]
    ours = [replace(_host(each), gpus=min(each.workers, here.gpus)) for each in listed if each.is_here]
    ours = ours or [replace(here, cores=here.workers, in_cluster=True)]
    return [*ours, *(_host(each) for each in listed if not each.is_here)]


def ladder(here: Host, *others: Host) -> list[Flavor]:
    """The usual sizes that this host carries and the one that takes it whole; then those that need other hosts."""
    usual = [*SIZES.values(), *(int(MOST_WORKERS * multiple) for multiple in MULTIPLES)]
    whole = sum(host.workers for host in (here, *others))
    counts = sorted({*(n for n in usual if n <= max(here.most, whole)), here.workers, whole})
    return [here.flavor(n) if n <= here.most else _spread(n, here, *others) for n in counts]


def flavors(environment: Mapping[str, str]) -> list[Flavor]:
    """All flavors there are: the ladder, then the person's own. Raises Diagnostic for a broken file."""
    here, *others = hosts(environment)
    own = [_own(table, here) for table in read_tables(config_folder(environment) / "flavors.toml", "flavor", EXAMPLE)]
    taken = {flavor.size.lower() for flavor in own}
    return [*(flavor for flavor in ladder(here, *others) if flavor.size.lower() not in taken), *own]


def named(text: str, known: Sequence[Flavor]) -> Flavor | None:
    """The flavor of a full name, or of its part before the memory; case says nothing."""
    wanted = text.strip().lower()
    return next((flavor for flavor in known if wanted in (flavor.name.lower(), flavor.size.lower())), None)


def asked_for(text: str, environment: Mapping[str, str]) -> Flavor:
    """The flavor that MOAI_FLAVOR or `torch.moai.set_flavor` names, or of so many workers. Raises Diagnostic."""
    known = flavors(environment)
    found = named(text, known)
    if found is None and text.isdecimal() and int(text) >= 1:
        found = _counted(int(text), hosts(environment))
    if found is None:
        names = ", ".join(flavor.name for flavor in known)
        raise Diagnostic(f"there is no flavor `{text}`", hint=f"give a number of workers, from 1 on, or one of {names}")
    return startable(found, known)


def startable(flavor: Flavor, known: Sequence[Flavor]) -> Flavor:
    """The flavor, if it lies on this host alone. Raises Diagnostic."""
    if flavor.others:
        here = ", ".join(each.name for each in known if not each.others)
        raise Diagnostic(
            f"flavor `{flavor.name}` needs {flavor.others}, and workers on other hosts cannot be started yet",
            hint=f"choose one that lies on this host alone: {here}",
        )
    return flavor


def _size(workers: int) -> str:
    usual = {count: size for size, count in SIZES.items()}
    return usual.get(workers, f"{workers / MOST_WORKERS:g}xLarge")


def _host(listed: ClusterHost) -> Host:
    return Host(listed.workers, listed.memory, listed.name, in_cluster=True)


def _counted(workers: int, found: Sequence[Host]) -> Flavor:
    """Of any number of workers; in a cluster, of no more than this host has or, with others, all have."""
    here, *others = found
    return _spread(workers, here, *others) if here.in_cluster and workers > here.most else here.flavor(workers)


def _spread(workers: int, here: Host, *others: Host) -> Flavor:
    """Workers that fill one host after the other, with their shares of these hosts' memory. Raises Diagnostic."""
    left, memory, used = workers, 0, list[str]()
    for host in (here, *others):
        taken = min(left, host.workers)
        left -= taken
        memory += host.memory * taken // host.workers
        used += [host.name] if taken else []
    if left:
        raise Diagnostic(
            f"the hosts of cluster.toml have {workers - left} workers together, and not {workers}",
            hint=f"ask for {here.workers} or less",
        )
    return Flavor(_size(workers), workers, memory, ", ".join(used[1:]), min(workers, here.gpus))


def _own(table: TomlTable, here: Host) -> Flavor:
    """One of the person's own."""
    table.check_keys(("name", "workers", "memory"))
    name, workers = table.name(), table.workers()
    if here.in_cluster and workers > here.workers:
        raise Diagnostic(
            f"flavor `{name}` has {workers} workers, and in the cluster this host has {here.workers}",
            table.place("workers"),
        )
    has_memory = "memory" in table.values
    usual = here.flavor(workers)
    return replace(usual, size=name, memory=table.memory(here.memory) if has_memory else usual.memory)
