"""The pool with workers that are only sockets."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import cast

import pytest
from torch import Tensor

from moaic.runtime.controller.errors import WorkerError
from moaic.runtime.controller.launch import LocalWorkers
from moaic.runtime.controller.source_lines import SourceLines
from moaic.runtime.controller.worker_pool import WorkerPool
from moaic.runtime.host.status import IDLE, Activity
from moaic.runtime.protocol.commands import NO_REQUEST, AnswerCode, Free, to_wire
from moaic.runtime.protocol.frames import Connection
from moaic.runtime.protocol.wire import TENSORS


@dataclass
class Ended:
    connection: Connection[Tensor]

    def ending(self) -> str:
        return "ended with exit code 1"


@dataclass
class Workers:
    workers: list[Ended]

    def activity(self, rank: int) -> Activity:
        return IDLE

    def kill(self) -> None:
        for worker in self.workers:
            worker.connection.close()


def test_the_cause_is_found_although_it_was_received_while_others_were_sent_to() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    workers = Workers([Ended(Connection(end, TENSORS)) for end, _ in pairs])
    pool = WorkerPool(cast("LocalWorkers", workers), SourceLines(), lambda code, subject, step: "starting")
    consequence, cause = (Connection(end, TENSORS) for _, end in pairs)
    cause.send([NO_REQUEST, AnswerCode.FAILED, -1, "copying", "ValueError", "the cause", "", False, None])
    consequence.close()
    cause.close()
    with pytest.raises(WorkerError, match="worker 1 of 2 failed in copying: ValueError: the cause"):
        pool.send(to_wire([Free(-1, [1])]), [[], []])
