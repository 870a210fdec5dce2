"""Looks at all hosts of a cluster as a program would meet them, without starting workers."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import ClusterSettings
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.launch.gathering import Gathering, gather
from moaic.runtime.launch.host_check import CheckedHost
from moaic.runtime.launch.host_facts import facts
from moaic.runtime.launch.hosts import ANSWER_SECONDS, END_SECONDS, PROGRAM, HostWorkers
from moaic.runtime.launch.identity import host_name
from moaic.runtime.launch.launchers.launcher import Say
from moaic.runtime.launch.launchers.registry import launcher_for
from moaic.runtime.protocol.frames import BYTES, Closed
from moaic.runtime.protocol.host_messages import HostCode, HostFacts, HostState, MeasuredLink
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import PeerAddress

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class CheckedCluster:
    """What was found; by host, this one among them. A host that could not be asked is missing."""

    names: Sequence[str]
    """Of all hosts in the order in which they were asked for, this one first; Slurm names the others as its nodes."""
    facts: Mapping[str, HostFacts]
    states: Mapping[str, HostState]
    links: Mapping[tuple[str, str], MeasuredLink]
    """By the host that connects and the one that it connects to."""
    problems: Mapping[str, Diagnostic]
    """Why hosts could not be asked, by host."""


def check_cluster(
    here: str, others: Sequence[HostShare], settings: ClusterSettings, folder: Path, say: Say
) -> CheckedCluster:
    """Gather the hosts, ask each what it has, and measure the links between them.

    `here` is the name of this host. Raises Diagnostic if nobody can come, or nothing can be written to the folder.
    """
    launcher = launcher_for(settings, os.environ, say)
    try:
        with _marker(folder) as marker:
            found = gather(others, settings, launcher, say, partly=True)
            check = _Check(here, found)
            try:
                return check.run(marker)
            finally:
                check.close()
    finally:
        launcher.end(END_SECONDS)


@contextmanager
def _marker(folder: Path) -> Generator[str]:
    """The path of a new file in the folder, for as long as hosts look for it. Raises Diagnostic."""
    try:
        file = tempfile.NamedTemporaryFile(prefix=".moaic-check-", dir=folder.absolute())  # noqa: SIM115 - below
    except OSError as error:
        raise Diagnostic(
            f"nothing can be written to {folder.absolute()}: {error.strerror}",
            hint="name the folder of your checkpoints: --folder DIR",
        ) from error
    with file:
        yield file.name


class _Check:
    """One check of the hosts that have come."""

    def __init__(self, here: str, found: Gathering) -> None:
        self._name = here
        self._names = [here, *found.names]
        self._here = CheckedHost(found.authority.credentials(PROGRAM))
        self._address = found.address
        self._shares = {share.name: share for share in found.shares}
        self._others = {
            name: HostWorkers(self._shares[name], range(0), stream, BYTES) for name, stream in found.streams.items()
        }
        self._problems = dict(found.problems)

    def run(self, marker: str) -> CheckedCluster:
        ours = facts()
        known = {self._name: ours, **self._answers(self._others, HostCode.HELLO, HostFacts.decoded)}
        # Others know no such questions.
        asked = [name for name in self._others if known[name].version == ours.version]
        states = {self._name: self._here.state(marker, self._address), **self._states(asked, marker)}
        links = self._links(states)
        self._of_each(asked, lambda other: other.tell(HostCode.DONE))
        return CheckedCluster(self._names, known, states, links, self._problems)

    def close(self) -> None:
        self._here.close()
        for other in self._others.values():
            other.close()

    def _states(self, asked: Iterable[str], marker: str) -> dict[str, HostState]:
        def ask(other: HostWorkers[bytearray]) -> None:
            other.tell(HostCode.CHECK, marker, self._shares[other.name].address)

        return self._answers(self._of_each(asked, ask), HostCode.CHECKED, HostState.decoded)

    def _links(self, states: Mapping[str, HostState]) -> dict[tuple[str, str], MeasuredLink]:
        """The links between all hosts that listen, in rounds: each sends to one, and receives from one."""
        ends = {name: self._end(name, state.port) for name, state in states.items() if state.port}
        names = list(ends)
        links: dict[tuple[str, str], MeasuredLink] = {}
        for distance in range(1, len(names)):
            turned = names[distance:] + names[:distance]
            links |= self._round(dict(zip(names, turned, strict=True)), ends)
        return links

    def _round(
        self, targets: Mapping[str, str], ends: Mapping[str, PeerAddress]
    ) -> dict[tuple[str, str], MeasuredLink]:
        """The link of each host to its target, all measured at once."""

        def ask(other: HostWorkers[bytearray]) -> None:
            end = ends[targets[other.name]]
            other.tell(HostCode.MEASURE, end.address, end.port, end.name)

        asked = self._of_each(targets, ask)
        found = {self._name: self._here.measure(ends[targets[self._name]])} if self._name in targets else {}
        found |= self._answers(asked, HostCode.MEASURED, MeasuredLink.decoded)
        return {(name, targets[name]): link for name, link in found.items()}

    def _end(self, name: str, port: int) -> PeerAddress:
        """Where a host accepts links, and the name in its certificate."""
        if name == self._name:
            return PeerAddress(self._address, port, PROGRAM)
        return PeerAddress(self._shares[name].address, port, host_name(name))

    def _answers(self, names: Iterable[str], code: HostCode, decoded: Callable[[Any], Answer]) -> dict[str, Answer]:
        """What hosts answer to a question that all have got: those that do not are waited for together."""
        until = time.monotonic() + ANSWER_SECONDS
        return self._of_each(names, lambda other: decoded(other.hear(code, until)))

    def _of_each(self, names: Iterable[str], ask: Callable[[HostWorkers[bytearray]], Answer]) -> dict[str, Answer]:
        """The answers of hosts; one that gives none is let go, and the reason kept."""
        answers: dict[str, Answer] = {}
        for name in [name for name in names if name in self._others]:
            try:
                answers[name] = ask(self._others[name])
            except Diagnostic as error:
                self._let_go(name, error)
            except Closed:
                self._let_go(name, Diagnostic(f"host `{name}` could not be asked: its agent has ended"))
            except Refused as error:
                self._let_go(name, Diagnostic(f"host `{name}` could not be asked: {error}"))
        return answers

    def _let_go(self, name: str, problem: Diagnostic) -> None:
        self._problems[name] = problem
        self._others.pop(name).close()
