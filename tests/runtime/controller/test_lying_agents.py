"""A pool whose workers are behind the agent of another host, which sends anything: the program gets a WorkerError."""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moaic.runtime.controller import worker_pool
from moaic.runtime.controller.errors import WorkerError
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.host.flavors import HostShare
from moaic.runtime.host.gpus import CPU
from moaic.runtime.host.status import LINE, Status
from moaic.runtime.launch.hosts import HostWorkers
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.commands import NO_REQUEST, AnswerCode
from moaic.runtime.protocol.host_messages import HostCode
from moaic.runtime.protocol.shared_memory import create_memory
from moaic.runtime.protocol.wire import tensors
from tests.runtime.mutations import Messages, Mutator

MOST_BYTES = 128 << 20

FAILURE = [-1, "copying", "ValueError", "the cause", "trace", False, [1, 2, 3]]

ANSWERS: Messages = [
    ([NO_REQUEST, AnswerCode.HELLO, 77], []),
    ([0, AnswerCode.DONE, [1, 2]], []),
    ([0, AnswerCode.VALUE, ["f32", [2, 3]]], [b"x" * 24]),
    ([NO_REQUEST, AnswerCode.FAILED, *FAILURE], []),
    ([NO_REQUEST, AnswerCode.RAISED, 3, *FAILURE], []),
    ([0, AnswerCode.POISONED, 3], []),
    ([NO_REQUEST, AnswerCode.ADOPTED, [0], 2, 0.5, 1, ""], []),
    ([NO_REQUEST, AnswerCode.NOT_CAPTURED, "reason"], []),
]

MESSAGES: Messages = [
    *(([HostCode.ANSWER, rank, body], blocks) for rank in range(2) for body, blocks in ANSWERS),
    ([HostCode.STATUS, bytes(2 * LINE), [1]], []),
    ([HostCode.ENDED, 1, "the process was killed"], []),
    ([HostCode.FAILED, "message", "hint"], []),
    ([HostCode.HELLO, [1, "1", "2", "3", "cpu", 2]], []),
    ([HostCode.READY, [5, 6]], []),
]


@dataclass
class Behind:
    """The workers of one other host."""

    channels: tuple[HostWorkers[Tensor], ...]
    status: Status
    devices: tuple[str, ...] = (CPU, CPU)
    hosts: tuple[str, ...] = ("node2", "node2")
    carrier: Carrier = Carrier.MEMORY

    def ending(self, rank: int) -> str | None:
        return self.channels[0].ending(rank)

    def is_stopped(self, rank: int) -> bool:
        return self.channels[0].is_stopped(rank)

    def kill(self, rank: int) -> None:
        self.channels[0].kill(rank)

    def close(self) -> None:
        self.channels[0].close()

    def kill_all(self) -> None:
        self.close()


def allocate(size: int) -> Tensor:
    """As on a machine with 64 MiB left."""
    if size > MOST_BYTES // 2:
        raise MemoryError(f"no {size} bytes")
    return torch.empty(size, dtype=torch.uint8)


@pytest.fixture
def pool_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[socket.socket], WorkerPool]]:
    """Makes pools, of which one at a time is used."""
    monkeypatch.setattr(worker_pool, "GRACE_SECONDS", 0.0)
    memory = create_memory(2)
    status = Status(memory, 2)

    def make(end: socket.socket) -> WorkerPool:
        channel = HostWorkers(HostShare("node2", "", 2), range(2), end, tensors(allocate))
        channel.status = status
        return WorkerPool(Behind((channel,), status), SourceLines(), lambda code, subject, step: "starting")

    yield make
    status.close()


def received(pool: WorkerPool) -> None:
    """Receive until the end, which is an error of the pool's own."""
    while True:
        pool.receive()


def fuzz(pool_of: Callable[[socket.socket], WorkerPool], seed: int, streams: int) -> None:
    """No stream takes much memory; pools of streams before may wait for the garbage collector."""
    mutator, most = Mutator(seed), 0
    tracemalloc.start()
    for _ in range(streams):
        there, here = socket.socketpair()
        pool = pool_of(here)
        there.sendall(mutator.stream(MESSAGES))
        there.close()
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with pytest.raises(WorkerError):
            received(pool)
        most = max(most, tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert most < MOST_BYTES, f"{most:,} bytes"


@pytest.mark.timeout(60)
def test_an_agent_that_sends_anything(pool_of: Callable[[socket.socket], WorkerPool]) -> None:
    fuzz(pool_of, seed=0, streams=3000)


@pytest.mark.exact
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_agents_that_send_anything(pool_of: Callable[[socket.socket], WorkerPool], seed: int) -> None:
    fuzz(pool_of, seed, streams=30_000)
