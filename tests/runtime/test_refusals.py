"""Workers and controllers that are sent what is no frame: they end, and the user reads why."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from moaic.runtime.controller.accelerator import Accelerator
from moaic.runtime.controller.buffer import whole
from moaic.runtime.controller.errors import WorkerError
from moaic.runtime.controller.launch import launch
from moaic.runtime.protocol.commands import NO_REQUEST, AnswerCode
from moaic.runtime.protocol.frames import HEAD, MAGIC, VERSION, encode
from tests.runtime.test_failures import gone

LONG_BODY = HEAD.pack(MAGIC, VERSION, 2**32 - 1, 0)


@dataclass
class Ends:
    """An accelerator of two workers, and second descriptors of the sockets between both, by rank."""

    accelerator: Accelerator
    controllers: list[socket.socket] = field(default_factory=list[socket.socket])
    workers: list[socket.socket] = field(default_factory=list[socket.socket])


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    kept: list[tuple[socket.socket, socket.socket]] = []
    make = socket.socketpair

    def keeping() -> tuple[socket.socket, socket.socket]:
        pair = make()
        kept.append((pair[0].dup(), pair[1].dup()))
        return pair

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socketpair", keeping)
        workers = launch(2, {"MOAI_COMPILE": "0"})
    accelerator = Accelerator(workers)
    accelerator.synchronize()
    yield Ends(accelerator, [one for one, _ in kept], [other for _, other in kept])
    for end in (end for pair in kept for end in pair):
        end.close()
    accelerator.close()


def pids(accelerator: Accelerator) -> list[int]:
    return [worker.pid for worker in accelerator.stats().workers]


@pytest.mark.timeout(60)
def test_a_worker_ends_and_the_user_reads_what_it_refused(ends: Ends) -> None:
    processes = pids(ends.accelerator)
    ends.controllers[1].sendall(LONG_BODY)
    with pytest.raises(WorkerError, match="Refused: a body of 4,294,967,295 bytes, the most is 67,108,864") as error:
        ends.accelerator.synchronize()
    assert str(error.value).startswith("worker 1 of 2 failed in receiving a value")
    assert gone(processes)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (LONG_BODY, "a body of 4,294,967,295 bytes, the most is 67,108,864"),
        (b"GET / HTTP/1.1\r\n", "a frame that begins with b'GET ', not b'moai'"),
        (
            HEAD.pack(MAGIC, VERSION, 3, 0) + encode([NO_REQUEST, AnswerCode.DONE])[:2] + b"\xc1",
            "a body that cannot be read",
        ),
    ],
)
def test_a_worker_that_sends_no_frame_is_lost_with_the_reason(ends: Ends, stream: bytes, reason: str) -> None:
    processes = pids(ends.accelerator)
    ends.workers[1].sendall(stream)
    with pytest.raises(WorkerError) as error:
        ends.accelerator.synchronize()
    assert str(error.value).startswith("worker 1 of 2 failed in ")
    assert f": its answer could not be received: {reason}" in str(error.value)
    assert gone(processes)


@pytest.mark.timeout(60)
def test_a_worker_that_refuses_a_value_says_so_although_the_controller_still_writes(ends: Ends) -> None:
    processes = pids(ends.accelerator)
    ends.workers[0].close()
    ends.controllers[0].sendall(b"anything that is no frame")
    buffer = ends.accelerator.buffer("f32", (1 << 24,))
    ends.accelerator.upload(buffer, torch.ones(1 << 24))

    def upload_and_wait() -> None:
        ends.accelerator.launch("aten.add_.Scalar", (whole(buffer), 1), {}, ())
        ends.accelerator.synchronize()

    with pytest.raises(WorkerError, match="Refused: a frame that begins with b'anyt', not b'moai'"):
        upload_and_wait()
    assert gone(processes)
