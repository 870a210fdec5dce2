"""The pool with workers that are only sockets."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from moaic.runtime.controller.errors import WorkerError
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.host.gpus import CPU
from moaic.runtime.host.status import IDLE, Activity, Status
from moaic.runtime.launch.local_workers import LocalWorker
from moaic.runtime.protocol.carrier import Carrier
from moaic.runtime.protocol.commands import NO_REQUEST, AnswerCode, Free, to_wire
from moaic.runtime.protocol.frames import Connection
from moaic.runtime.protocol.wire import TENSORS


@dataclass
class EndedWorkers:
    """Of this host, all of which have ended."""

    channels: tuple[LocalWorker[Tensor], ...]
    devices: tuple[str, ...] = (CPU, CPU)
    hosts: tuple[str, ...] = ("", "")
    carrier: Carrier = Carrier.MEMORY

    @property
    def status(self) -> Status:
        def activity(rank: int) -> Activity:
            return IDLE

        idle: Any = SimpleNamespace(activity=activity)
        return idle

    def ending(self, rank: int) -> str:
        return "the process ended with exit code 1"

    def is_stopped(self, rank: int) -> bool:
        return False

    def kill(self, rank: int) -> None:
        pass

    def close(self) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        for channel in self.channels:
            channel.close()


def test_the_cause_is_found_although_it_was_received_while_others_were_sent_to() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    channels = tuple(LocalWorker(rank, Connection(end, TENSORS)) for rank, (end, _) in enumerate(pairs))
    pool = WorkerPool(EndedWorkers(channels), SourceLines(), lambda code, subject, step: "starting")
    consequence, cause = (Connection(end, TENSORS) for _, end in pairs)
    cause.send([NO_REQUEST, AnswerCode.FAILED, -1, "copying", "ValueError", "the cause", "", False, None])
    consequence.close()
    cause.close()
    with pytest.raises(WorkerError, match="worker 1 of 2 failed in copying: ValueError: the cause"):
        pool.send(to_wire([Free(-1, [1])]), [[], []])
