"""Workers of several hosts: those of this one, and by an agent those of each other."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

from moaic.ir.errors import Diagnostic
from moaic.runtime.host.cluster_settings import PORTS, ClusterSettings
from moaic.runtime.host.flavors import Flavor, HostShare
from moaic.runtime.host.status import LINE, Status
from moaic.runtime.launch.channel import Channel
from moaic.runtime.launch.gathering import Gathering, gather
from moaic.runtime.launch.host_facts import check_alike, facts, unequal_threads, unlike_gpus
from moaic.runtime.launch.identity import host_name
from moaic.runtime.launch.launchers.launcher import Launcher, Say
from moaic.runtime.launch.launchers.registry import launcher_for
from moaic.runtime.launch.listening import closed_after, listen
from moaic.runtime.launch.local_workers import LocalShare, LocalWorkers, carrier_for, start
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import BlockMemory, ByteStream, Closed, Connection, Message, encode, readable
from moaic.runtime.protocol.host_messages import MOST_CHARACTERS, HostCode, HostFacts, check_from_agent, failure
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import PeerAddress, Peers
from moaic.text.printable import printable

ANSWER_SECONDS: Final = 30.0
"""Time that an agent has for each step of the start."""

END_SECONDS: Final = 2.0
"""Time that agents have to end their workers."""

PROGRAM: Final = "program"
"""The name of this host in its certificate: none that another host can have."""

SEEN: Final = encode([HostCode.SEEN])

Block = TypeVar("Block")


class HostWorkers(Generic[Block]):
    """The channel to all workers of another host, through its agent."""

    def __init__(self, share: HostShare, ranks: range, stream: ByteStream, blocks: BlockMemory[Block]) -> None:
        self.name = share.name
        self.devices: Final = share.devices
        self.ranks = ranks
        self._connection = Connection(stream, blocks, partial(check_from_agent, ranks, LINE))
        self._ends: dict[int, str] = {}
        self._stopped: frozenset[int] = frozenset()
        self.status: Status | None = None
        """Where the status lines of the host's workers are mirrored, once there are any."""

    @property
    def closed(self) -> bool:
        return self._connection.closed

    def fileno(self) -> int:
        return self._connection.fileno()

    def push(self) -> bool:
        return self._connection.push()

    def pull(self) -> None:
        self._connection.pull()

    def check(self) -> None:
        self._connection.check()

    def post(self, bodies: Sequence[bytes | None], rows: Sequence[Sequence[Block | None]]) -> int:
        posted = 0
        for body in {id(body): body for body in bodies if body is not None}.values():
            blocks: list[Block] = []
            places: dict[int, int] = {}
            relayed: list[tuple[int, list[int]]] = []
            for rank, own, row in zip(self.ranks, bodies, rows, strict=True):
                if own is body:
                    relayed.append((rank, [_place(block, places, blocks) for block in row]))
            posted += self._connection.post(encode([HostCode.RELAY, relayed, body]), blocks)
        return posted

    def next(self) -> tuple[int, Message[Block]] | None:
        while (message := self._connection.next()) is not None:
            match message.body:
                case [HostCode.ANSWER, rank, body]:
                    return rank, Message(body, message.blocks)
                case [HostCode.STATUS, lines, stopped]:
                    self._stopped = frozenset(stopped)
                    # Sent with the next commands, or by a controller that waits: on its own it would cost as much.
                    self._connection.post(SEEN)
                    if self.status is not None:
                        self.status.mirror(self.ranks.start, lines)
                case [HostCode.ENDED, rank, words]:
                    self._ends[rank] = printable(words, MOST_CHARACTERS)
                case _:
                    continue
        return None

    def ended(self) -> Sequence[int]:
        return self.ranks if self.closed else tuple(self._ends)

    def ending(self, rank: int) -> str | None:
        if rank in self._ends:
            return self._ends[rank]
        if not self.closed:
            return None
        gone = f"the connection to host {self.name} has ended: its agent was ended, or its network or machine failed"
        return self._refusal or gone

    def is_stopped(self, rank: int) -> bool:
        return rank in self._stopped

    def kill(self, rank: int) -> None:
        self._connection.post(encode([HostCode.KILL, rank]))
        self._connection.push()

    def tell(self, *body: Any) -> None:
        """Send a message of the start. Raises Closed."""
        self._connection.send(list(body))

    def hear(self, code: HostCode, until: float | None = None) -> Any:
        """The field of the next message of the start; `until` is by the monotonic clock.

        Raises Diagnostic for another message, or for none in time, and Refused for one that cannot be read.
        """
        found, *fields = self._await(time.monotonic() + ANSWER_SECONDS if until is None else until)
        if found == HostCode.FAILED:
            raise failure(self.name, fields)
        if found != code or len(fields) != 1:
            raise Diagnostic(f"the agent of host `{self.name}` does not speak this version's language")
        return fields[0]

    def _await(self, until: float) -> Sequence[Any]:
        """The next message; one that has arrived in time is also taken later. Raises Diagnostic."""
        is_last, has_more = False, False
        while (message := self._connection.next()) is None:
            if self.closed:
                raise self._silent("has ended without an answer", "look at what it has printed there")
            left = max(0.0, until - time.monotonic())
            if is_last or not (has_more or readable([self._connection], left)):
                raise self._silent(
                    f"has not answered for {ANSWER_SECONDS:.0f} s", "look at its log, and at that host's load"
                )
            is_last = not left
            # Not all at once: an agent that never stops sending would never be heard.
            has_more = self._connection.pull_some()
        return message.body

    def _silent(self, words: str, hint: str) -> Diagnostic:
        reason = f": {self._refusal}" if self._refusal else ""
        return Diagnostic(f"the agent of host `{self.name}` {words}{reason}", hint=hint)

    @property
    def _refusal(self) -> str:
        """Why this end has ended the connection; it may quote the other one."""
        return printable(self._connection.refusal, MOST_CHARACTERS)

    def close(self) -> None:
        self._connection.close()


def _place(block: Block | None, places: dict[int, int], blocks: list[Block]) -> int:
    """The index of a block in a message, where equal ones stand once."""
    if block is None:
        return -1
    if id(block) not in places:
        places[id(block)] = len(blocks)
        blocks.append(block)
    return places[id(block)]


@dataclass(frozen=True, slots=True)
class ClusterWorkers(Generic[Block]):
    """The workers of all hosts as one list."""

    local: LocalWorkers[Block]
    others: tuple[HostWorkers[Block], ...]
    launcher: Launcher

    @property
    def channels(self) -> Sequence[Channel[Block]]:
        return (*self.local.channels, *self.others)

    @property
    def devices(self) -> tuple[str, ...]:
        return self.local.devices + tuple(device for other in self.others for device in other.devices)

    @property
    def carrier(self) -> Carrier:
        return self.local.carrier

    @property
    def hosts(self) -> tuple[str, ...]:
        return self.local.hosts + tuple(other.name for other in self.others for _ in other.ranks)

    @property
    def status(self) -> Status:
        return self.local.status

    def ending(self, rank: int) -> str | None:
        return self._of(rank).ending(rank)

    def is_stopped(self, rank: int) -> bool:
        return self._of(rank).is_stopped(rank)

    def kill(self, rank: int) -> None:
        self._of(rank).kill(rank)

    def close(self) -> None:
        self._close_others()
        self.local.close()
        self.launcher.end(END_SECONDS)

    def kill_all(self) -> None:
        self._close_others()
        self.local.kill_all()
        self.launcher.end(END_SECONDS)

    def _of(self, rank: int) -> LocalWorkers[Block] | HostWorkers[Block]:
        return next((other for other in self.others if rank in other.ranks), self.local)

    def _close_others(self) -> None:
        for other in self.others:
            other.close()


def start_cluster(
    flavor: Flavor,
    settings: ClusterSettings,
    blocks: BlockMemory[Block],
    environment: Mapping[str, str],
    say: Say,
) -> ClusterWorkers[Block]:
    """Start the workers of a flavor on all its hosts; each sends HELLO when it is ready.

    `environment` is given to the workers of other hosts. `say` gets what the user has to do or to know. Raises
    Diagnostic for a host that does not come in time or does not suit.
    """
    launcher = launcher_for(settings, os.environ, say)
    try:
        found = gather(flavor.hosts, settings, launcher, say)
        try:
            found.check()
            flavor = replace(flavor, hosts=found.shares)
            others = _channels(flavor, found, blocks)
            # Each worker of another host has a GPU of its own, so this host decides.
            carrier = carrier_for(flavor.devices_here, is_private=settings.trusted_network)
            if carrier is not Carrier.MEMORY:
                say("GPUs exchange data unencrypted, as cluster.toml says that the network is trusted.")
            local = _begin(flavor, carrier, found, others, blocks, environment, say)
        except BaseException:
            found.close()
            raise
    except BaseException:
        launcher.end(0.0)
        raise
    return ClusterWorkers(local, others, launcher)


def _channels(flavor: Flavor, found: Gathering, blocks: BlockMemory[Block]) -> tuple[HostWorkers[Block], ...]:
    """The channel to the workers of each host, numbered after those of this one."""
    channels: list[HostWorkers[Block]] = []
    first = flavor.here
    for share in flavor.hosts:
        ranks = range(first, first + share.workers)
        channels.append(HostWorkers(share, ranks, found.streams[share.name], blocks))
        first = ranks.stop
    return tuple(channels)


def _ports(other: HostWorkers[Block]) -> Sequence[int]:
    """The port of each worker of a host. Raises Diagnostic: one too many would take the rank of another host."""
    ports = other.hear(HostCode.READY)
    if len(ports) != len(other.ranks) or not all(type(port) is int and port in PORTS[1:] for port in ports):
        raise Diagnostic(f"the agent of host `{other.name}` has given no port for each of its workers")
    return ports


def _begin(
    flavor: Flavor,
    carrier: Carrier,
    found: Gathering,
    others: Sequence[HostWorkers[Block]],
    blocks: BlockMemory[Block],
    environment: Mapping[str, str],
    say: Say,
) -> LocalWorkers[Block]:
    """Tell all hosts where each worker is, and start those of this one."""
    me = found.authority.credentials(PROGRAM)
    stores = 0 if carrier is Carrier.MEMORY else 1
    with (
        closed_after(listen(found.address, flavor.here)) as listeners,
        closed_after(listen(found.address, stores)) as store,
    ):
        here = tuple(PeerAddress(found.address, each.getsockname()[1], me.name) for each in listeners)
        port = store[0].getsockname()[1] if store else 0
        known = Peers(here, 0, flavor.here, me.certificate, me.key, me.authority, port)
        try:
            peers = _agree(flavor, carrier, others, known, environment, say)
        except (Closed, Refused, ValueError, TypeError) as error:
            raise Diagnostic(f"a host of the cluster ended while workers were started: {error}") from error
        share = LocalShare(peers, listeners, store)
        local = start(flavor.here, blocks, devices=flavor.devices_here, carrier=carrier, share=share)
    for other in others:
        other.status = local.status
    return local


def _agree(
    flavor: Flavor,
    carrier: Carrier,
    others: Sequence[HostWorkers[Block]],
    here: Peers,
    environment: Mapping[str, str],
    say: Say,
) -> Peers:
    """All workers, which the other hosts know, too; `here` has those of this one. Raises Diagnostic."""
    ours, addresses = facts(), list(here.addresses)
    for other, share in zip(others, flavor.hosts, strict=True):
        theirs = HostFacts.decoded(other.hear(HostCode.HELLO))
        check_alike(other.name, theirs, ours)
        for difference in unlike_gpus(other.name, (theirs, share.gpus), (ours, flavor.gpus)):
            raise difference
        if words := unequal_threads(other.name, (theirs, len(other.ranks)), (ours, flavor.here)):
            say(words)
    for other, share in zip(others, flavor.hosts, strict=True):
        other.tell(HostCode.START, share.address, other.devices, str(carrier), dict(environment))
    for other, share in zip(others, flavor.hosts, strict=True):
        addresses += [PeerAddress(share.address, port, host_name(share.name)) for port in _ports(other)]
    for other in others:
        peers = Peers(tuple(addresses), other.ranks.start, len(other.ranks), b"", b"", b"", here.store)
        other.tell(HostCode.GO, peers.encoded())
    return replace(here, addresses=tuple(addresses))
