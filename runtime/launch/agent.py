"""The agent of a host: joins a job, starts the host's workers, and relays between them and the controller.

One thread, no torch. Neither end can stop the other by only writing: the agent reads whenever there is something to
read, except from a controller whose messages its workers do not take.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from moaic.ir.errors import Diagnostic
from moaic.runtime.launch.enrolment import Address, dial, enrol, token_of
from moaic.runtime.launch.host_check import answer_check
from moaic.runtime.launch.host_facts import facts
from moaic.runtime.launch.identity import Credentials
from moaic.runtime.launch.listening import closed_after, listen
from moaic.runtime.launch.local_workers import LocalShare, LocalWorker, LocalWorkers, check_kinds, start
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.frames import BYTES, Closed, Connection, Message, encode
from moaic.runtime.protocol.host_messages import HostCode, check_from_controller
from moaic.runtime.protocol.limits import Refused
from moaic.runtime.protocol.peers import Peers
from moaic.text.units import count

TURN_SECONDS: Final = 0.1
"""The most between two looks at the workers."""

STATUS_SECONDS: Final = 0.5
"""Interval at which changed status lines are sent; receiving them costs the controller as much as a step of a host."""

GRACE_SECONDS: Final = 1.0
"""Time that the fork server has to report the end of a worker whose socket has closed."""

MOST_UNSENT: Final = 64 << 20
"""Bytes for a worker that wait in the agent; beyond them, and at most one message more, the controller has to wait."""

ENROL_SECONDS: Final = 10.0

Say = Callable[[str], None]


def join(address: Address, host: str, secret: str, say: Say) -> None:
    """Serve one job as one of its hosts, until it ends. Raises Diagnostic for one that cannot be joined."""
    credentials = enrol(address, host, token_of(secret, host), ENROL_SECONDS)
    stream = dial(address, credentials, ENROL_SECONDS)
    connection = Connection(stream, BYTES)
    try:
        connection.send([HostCode.HELLO, facts().encoded()])
        first = answer_check(connection, credentials)
        if first[0] == HostCode.DONE:
            say(f"checked by the program at {address[0]}")
            return
        workers = _started(connection, credentials, first)
    except Closed:
        raise Diagnostic(
            f"the controller at {address[0]}:{address[1]} has let this host go",
            hint="its program has ended, or says there why it cannot use this host",
        ) from None
    except Refused as error:
        raise _other_version(address, error) from None
    say(f"{count(len(workers.channels), 'worker')} for the program at {address[0]}")
    try:
        _Relay(connection, workers).run()
    except Refused as error:
        raise _other_version(address, error) from None
    finally:
        connection.close()
        workers.close()


def _other_version(address: Address, error: Refused) -> Diagnostic:
    return Diagnostic(f"the controller at {address[0]}:{address[1]} is of another version: {error}")


def _started(
    connection: Connection[bytearray], credentials: Credentials, first: Sequence[Any]
) -> LocalWorkers[bytearray]:
    """Agree with the controller on the workers of this host, as its first message says, and start them."""
    address, devices, carrier, environment = _start(_expected(first, HostCode.START))
    try:
        check_kinds(devices, environment)
        listening = listen(address, len(devices))
    except Diagnostic as error:
        connection.send([HostCode.FAILED, error.message, error.hint])
        raise
    with closed_after(listening) as listeners:
        connection.send([HostCode.READY, [each.getsockname()[1] for each in listeners]])
        peers = replace(
            _peers(_expected(connection.receive().body, HostCode.GO), len(devices)),
            certificate=credentials.certificate,
            key=credentials.key,
            authority=credentials.authority,
        )
        try:
            share = LocalShare(peers, listeners)
            return start(len(devices), BYTES, environment, devices=devices, carrier=carrier, share=share)
        except OSError as error:
            raise Diagnostic(f"workers cannot be started: {error}") from error


def _start(body: Sequence[Any]) -> tuple[str, tuple[str, ...], Carrier, dict[str, str]]:
    """The address, the devices, the carrier and the variables of a START."""
    try:
        _, address, devices, carrier, environment = body
        # Nothing else of this host is the controller's to change.
        variables = {name: str(value) for name, value in environment.items() if name.startswith("MOAI_")}
        return str(address), tuple(map(str, devices)), Carrier(carrier), variables
    except (TypeError, ValueError, AttributeError) as error:
        raise Refused(f"a start that cannot be read: {error}") from error


def _peers(body: Sequence[Any], workers: int) -> Peers:
    """Those of a GO to a host with so many workers."""
    try:
        _, encoded = body
        peers = Peers.decoded(encoded)
        if peers.count != workers or peers.local.stop > len(peers.addresses):
            raise Refused("other workers than were started")
    except (TypeError, ValueError) as error:
        raise Refused(f"peers that cannot be read: {error}") from error
    return peers


def _expected(body: Any, code: HostCode) -> Sequence[Any]:
    """The message itself. Raises Refused for another one."""
    match body:
        case [found, *fields] if found == code:
            return [found, *fields]
        case _:
            raise Refused(f"another message than {code.name}")


class _Relay:
    """Passes on messages in both directions, and tells the controller how its workers are."""

    def __init__(self, controller: Connection[bytearray], workers: LocalWorkers[bytearray]) -> None:
        self._controller = controller
        self._workers = workers
        self._by_rank = {worker.rank: worker for worker in workers.channels}
        first = workers.channels[0].rank
        self._ranks = range(first, first + len(workers.channels))
        self._ends: dict[int, float] = {}
        """When the sockets of workers whose end has not been told yet have closed."""
        self._told: set[int] = set()
        self._status: tuple[bytes, list[int]] = (b"", [])
        self._status_at = 0.0
        self._is_seen = True
        """Whether the controller has received the last status lines."""

    def run(self) -> None:
        """Relay until the controller ends the connection."""
        while not self._controller.closed:
            self._wait()
            self._controller.check()
            self._listen_to_controller()
            for worker in self._workers.channels:
                self._listen_to(worker)
            self._tell_status()
            for each in (self._controller, *self._workers.channels):
                each.push()

    def _wait(self) -> None:
        poll = select.poll()
        events = 0 if self._is_full() else select.POLLIN
        poll.register(self._controller, events | (select.POLLOUT if self._controller.unsent else 0))
        for worker in self._workers.channels:
            if not worker.closed:
                events = select.POLLIN | (select.POLLOUT if worker.connection.unsent else 0)
                poll.register(worker, events)
        poll.poll(TURN_SECONDS * 1000)

    def _is_full(self) -> bool:
        return any(worker.connection.unsent > MOST_UNSENT for worker in self._workers.channels)

    def _listen_to_controller(self) -> None:
        """Obey it as long as the workers take what it sends; the next turn reads on, which no poll has to ask for."""
        has_more = True
        while has_more and not self._is_full():
            has_more = self._controller.pull_some()
            while (message := self._controller.next()) is not None:
                self._obey(message)

    def _obey(self, message: Message[bytearray]) -> None:
        sizes = [-1 if block is None else len(block) for block in message.blocks]
        check_from_controller(self._ranks, message.body, sizes)
        match message.body:
            case [HostCode.RELAY, rows, body]:
                blocks: list[bytearray | None]
                for rank, indices in rows:
                    if not self._by_rank[rank].closed:
                        blocks = [None if index < 0 else message.blocks[index] for index in indices]
                        self._by_rank[rank].post([body], [blocks])
            case [HostCode.KILL, rank]:
                self._workers.kill(rank)
            case _:
                self._is_seen = True

    def _listen_to(self, worker: LocalWorker[bytearray]) -> None:
        worker.pull()
        while (received := worker.next()) is not None:
            rank, message = received
            self._controller.post(encode([HostCode.ANSWER, rank, message.body]), message.blocks)
        if worker.closed and worker.rank not in self._told:
            self._tell_end(worker.rank)

    def _tell_end(self, rank: int) -> None:
        since = self._ends.setdefault(rank, time.monotonic())
        ending = self._workers.ending(rank)
        if ending is not None or time.monotonic() - since > GRACE_SECONDS:
            self._told.add(rank)
            self._tell_status(at_once=True)
            self._controller.post(encode([HostCode.ENDED, rank, ending or "it closed its connection"]))

    def _tell_status(self, *, at_once: bool = False) -> None:
        """Send the status lines if they have changed, and the controller has received the last ones."""
        now = time.monotonic()
        if not at_once and (now - self._status_at < STATUS_SECONDS or not self._is_seen):
            return
        lines = self._workers.status.lines(self._ranks.start, len(self._ranks))
        stopped = [rank for rank in self._by_rank if self._workers.is_stopped(rank)]
        self._status_at = now
        if (lines, stopped) != self._status:
            self._status, self._is_seen = (lines, stopped), False
            self._controller.post(encode([HostCode.STATUS, lines, stopped]))
