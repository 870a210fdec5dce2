"""A worker runs each command with the one handler for its class."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import CpuBackend
from moaic.runtime.comm.shm_slots import Mailbox
from moaic.runtime.comm.shm_transport import SharedMemoryTransport
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.host.env_flags import GraphMode
from moaic.runtime.protocol.commands import (
    AnswerCode,
    Command,
    Fetch,
    Fill,
    Free,
    List,
    Load,
    Put,
    ReadStatistics,
    Request,
    Run,
)
from moaic.runtime.protocol.shared_memory import create_memory
from moaic.runtime.protocol.wire import as_block
from moaic.runtime.worker.background import BackgroundCompiler, request_sockets
from moaic.runtime.worker.cuda_graph import SETTLED
from moaic.runtime.worker.worker import Worker
from tests.runtime.worker.test_cuda_graph import DOUBLED, RecordingCpu


@pytest.fixture
def worker() -> Worker:
    return worker_on(CpuBackend(), _unexpected)


def worker_on(backend: CpuBackend, report: Callable[[AnswerCode, list[Any]], None]) -> Worker:
    memory = create_memory(1)
    mailbox = Mailbox(memory, 0, 1, ())
    os.close(memory)
    server, requests = request_sockets()
    server.close()
    background = BackgroundCompiler(requests.detach(), 0, "cpu", mailbox)
    return Worker(WorkerContext(0, backend, SharedMemoryTransport(mailbox)), mailbox, background, report)


def _unexpected(code: AnswerCode, data: list[Any]) -> None:
    raise AssertionError(code, data)


def test_every_command_has_one_handler(worker: Worker) -> None:
    requests = set(get_args(Request))
    assert set(worker.requests.handlers) == requests
    assert set(worker.handlers) == set(get_args(Command)) - requests


def test_a_worker_keeps_what_it_is_given_until_it_is_freed(worker: Worker) -> None:
    blocks: list[Tensor | None] = [None, as_block(torch.arange(3.0))]
    worker.do(0, Put(line=0, buffer=1, dtype="f32", shape=[3], block=1), blocks)
    worker.do(1, Put(line=0, buffer=2, dtype="f32", shape=[3], block=0), blocks)
    worker.do(2, Fill(line=0, buffer=3, dtype="f32", shape=[2], ranks=[0], value=7.0), blocks)
    assert sorted(worker.table) == [1, 3]
    answer = worker.answer(Fetch(line=0, buffer=1, geometry=None, ranks=[0], request=1))
    assert answer is not None
    assert answer.block is not None
    assert answer.data == ["f32", [3]]
    assert answer.block.view(torch.float32).tolist() == [0.0, 1.0, 2.0]
    worker.do(3, Free(line=0, buffers=[1, 3]), ())
    assert worker.answer(List(line=0, request=2)) == ([], None)


def test_a_worker_out_of_memory_gives_back_that_of_graphs() -> None:
    said: list[AnswerCode] = []
    worker = worker_on(RecordingCpu(), lambda code, data: said.append(code))
    worker.do(0, Fill(line=0, buffer=1, dtype="f32", shape=[4], ranks=[0], value=7.0), ())
    graphs = GraphMode.ALWAYS.value
    worker.do(1, Load(line=0, program=0, text=DOUBLED, compiled=False, graphs=graphs, ranks=1), ())
    number = itertools.count(2)

    def repeated(runs: int) -> int:
        for _ in range(runs):
            worker.do(next(number), Run(line=0, program=0, inputs=[1], outputs=[2], key=None), ())
        answer = worker.answer(ReadStatistics(line=0, forget_peak=False, request=0))
        assert answer is not None
        return answer.data["programs"][0]["repeated"]

    assert repeated(SETTLED + 1) == 1
    worker.give_up(RuntimeError("an op failed"))
    assert repeated(1) == 2
    worker.give_up(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert repeated(SETTLED) == 2
    assert repeated(1) == 3
    assert said == [AnswerCode.RAISED] * 2
