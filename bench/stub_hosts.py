"""Stub agents: hosts of a job that join, start and answer as those of `moaic agent` do, and compute nothing.

One process is many of them, each with a TLS connection of its own. With `--local` it is instead a worker of the
controller's own host. Started by `stub_agents.py`.
"""

from __future__ import annotations

import argparse
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from math import prod
from typing import Any, Final

from moaic.ir.graph import Module
from moaic.ir.parser import parse
from moaic.ir.types import DTYPE_BYTES
from moaic.runtime.host.status import BEAT, LINE, STEPS
from moaic.runtime.launch.agent import STATUS_SECONDS, TURN_SECONDS
from moaic.runtime.launch.enrolment import Address, dial, enrol, token_of
from moaic.runtime.launch.host_facts import facts
from moaic.runtime.protocol.commands import (
    NO_REQUEST,
    AnswerCode,
    Fetch,
    Fill,
    List,
    Load,
    Put,
    ReadStatistics,
    Request,
    Run,
    Store,
    Trace,
    from_wire,
    is_request,
)
from moaic.runtime.protocol.frames import BYTES, Closed, Connection, decode, encode
from moaic.runtime.protocol.host_messages import HostCode
from moaic.runtime.protocol.peers import Peers

JOIN_SECONDS: Final = 60.0

FIRST_LINE: Final = "waiting for the controller\n"

RETRY_SECONDS: Final = 0.02

PORTS: Final = 1024
"""From this one on are the ports that stub workers say they listen on; nobody dials them."""

Answer = tuple[list[Any], tuple[int, ...], list[bytearray]]
"""Its body, the ranks that give it, and its blocks."""

Local = tuple[str, Sequence[int]]
"""Type and shape of a worker's part of a buffer."""


class Workers:
    """What the workers of a host know of the commands that they have been sent."""

    def __init__(self) -> None:
        self._buffers: dict[int, Local] = {}
        self._programs: dict[int, Module] = {}
        self.steps = 0

    def answers(self, body: bytes, ranks: Sequence[int]) -> Iterator[Answer]:
        """Those of these workers to a message."""
        _, commands = decode(body)
        for command in map(from_wire, commands):
            match command:
                case Put() | Fill():
                    self._buffers[command.buffer] = (command.dtype, command.shape)
                case Load():
                    self._programs[command.program] = _parsed(command.text)
                case Run():
                    self._run(command)
                case _ if is_request(command):
                    yield self._answer(command, ranks)
                case _:
                    continue

    def _run(self, run: Run) -> None:
        module = self._programs[run.program]
        self.steps += bool(module.main.gradients)
        for buffer, result in zip(run.outputs, module.main.results, strict=True):
            if buffer is not None:
                shape = result.type.layout.local_shape(result.type.shape, module.mesh)
                self._buffers[buffer] = (result.type.dtype, shape)

    def _answer(self, request: Request, ranks: Sequence[int]) -> Answer:
        if isinstance(request, Fetch):
            dtype, shape = self._buffers.get(request.buffer, ("f32", ()))
            if request.geometry is not None:
                _, shape, _, _, dtype = request.geometry
            block = bytearray(prod(shape) * DTYPE_BYTES[dtype])
            asked = tuple(rank for rank in ranks if rank in request.ranks)
            return [request.request, AnswerCode.VALUE, [dtype, list(shape)]], asked, [block]
        return [request.request, AnswerCode.DONE, _plain(request)], tuple(ranks), []


@cache
def _parsed(text: str) -> Module:
    return parse(text)


def _plain(request: Request) -> Any:
    if isinstance(request, ReadStatistics):
        numbers: Mapping[str, Any] = {"pid": 1, "pss": 0, "buffers": 0, "bytes": 0, "peak": 0}
        return {**numbers, "programs": {}, "launches": {}}
    return [] if isinstance(request, (List, Trace, Store)) else None


class StubHost:
    """The agent of one host, and its workers."""

    def __init__(self, connection: Connection[bytearray], ranks: range) -> None:
        self.connection = connection
        self._ranks = ranks
        self._workers = Workers()
        self._told = (0, 0)
        self._told_at = 0.0
        self._is_seen = True

    def obey(self, now: float) -> None:
        """Do what the controller has sent, and tell it how the workers are."""
        self.connection.pull()
        while (message := self.connection.next()) is not None:
            code, *fields = message.body
            if code == HostCode.RELAY:
                rows, body = fields
                for answer, ranks, blocks in self._workers.answers(body, [rank for rank, _ in rows]):
                    self._send(answer, ranks, blocks)
            elif code == HostCode.SEEN:
                self._is_seen = True
        self._tell_status(now)
        self.connection.push()

    def greet(self) -> None:
        for rank in self._ranks:
            self._send([NO_REQUEST, AnswerCode.HELLO, 1000 + rank], (rank,), [])
        self.connection.push()

    def _send(self, answer: list[Any], ranks: Sequence[int], blocks: list[bytearray]) -> None:
        for rank in ranks:
            self.connection.post(encode([HostCode.ANSWER, rank, answer]), blocks)

    def _tell_status(self, now: float) -> None:
        """As an agent does: workers beat once a second, and count their steps."""
        steps, beat = state = self._workers.steps, int(now)
        if now - self._told_at < STATUS_SECONDS or not self._is_seen or state == self._told:
            return
        self._told, self._told_at, self._is_seen = state, now, False
        line = bytearray(LINE)
        words = memoryview(line).cast("q")
        words[BEAT], words[STEPS] = beat, steps
        self.connection.post(encode([HostCode.STATUS, bytes(line) * len(self._ranks), []]))


def wait_for(port: int) -> None:
    """Wait until somebody listens."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(RETRY_SECONDS)
        else:
            return


def join(address: Address, host: str) -> StubHost:
    """What `agent.join` does, up to the relay."""
    credentials = enrol(address, host, token_of(os.environ["MOAI_TOKEN"], host), JOIN_SECONDS)
    connection = Connection(dial(address, credentials, JOIN_SECONDS), BYTES)
    connection.send([HostCode.HELLO, facts().encoded()])
    _, _, devices, _ = connection.receive().body
    connection.send([HostCode.READY, list(range(PORTS, PORTS + len(devices)))])
    _, encoded = connection.receive().body
    stub = StubHost(connection, Peers.decoded(encoded).local)
    stub.greet()
    return stub


def serve(stubs: Sequence[StubHost]) -> None:
    """Be all these hosts until the controller ends the job."""
    by_descriptor = {stub.connection.fileno(): stub for stub in stubs}
    poll = select.epoll()
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    told = time.monotonic()
    while True:
        arrived = poll.poll(TURN_SECONDS)
        now = time.monotonic()
        if now - told > TURN_SECONDS:
            told, arrived = now, [(descriptor, 0) for descriptor in by_descriptor]
        for descriptor, _ in arrived:
            by_descriptor[descriptor].obey(now)
        if any(stub.connection.closed for stub in stubs):
            return


def serve_local(descriptor: int) -> None:
    """Be a worker of the controller's host, of rank 0."""
    connection, workers = Connection(socket.socket(fileno=descriptor), BYTES), Workers()
    connection.send([NO_REQUEST, AnswerCode.HELLO, os.getpid()])
    with suppress(Closed):
        while True:
            body = encode(connection.receive().body)
            for answer, ranks, blocks in workers.answers(body, (0,)):
                if ranks:
                    connection.send(answer, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local", type=int, metavar="DESCRIPTOR")
    parser.add_argument("--connect", type=int, metavar="PORT")
    parser.add_argument("--hosts", type=int)
    chosen = parser.parse_args()
    if chosen.local is not None:
        serve_local(chosen.local)
        return
    print(FIRST_LINE, end="", flush=True)
    wait_for(chosen.connect)
    names = [f"node{number + 1}" for number in range(chosen.hosts)]
    with ThreadPoolExecutor(chosen.hosts) as threads:
        stubs = list(threads.map(partial(join, ("127.0.0.1", chosen.connect)), names))
    serve(stubs)


if __name__ == "__main__":
    main()
