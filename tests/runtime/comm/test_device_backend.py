"""A GPU's bookkeeping of asynchronous work; streams and events here only record who waited."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import BEHIND, GpuBackend
from moaic.runtime.comm.reshard import is_shared

HERE = torch.device("cuda", 0)


class Stream:
    """Knows the ends that it has waited for."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.waited: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other)

    def wait_event(self, event: Event) -> None:
        self.waited.append(event)


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that computes, in a PyTorch that has streams and no GPU."""
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Generator[None]:
        current.append(stream)
        yield
        current.pop()

    def current_stream(device: torch.device) -> Stream:
        return current[-1]

    def set_device(device: torch.device) -> None: ...

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return current[0]


def doubled(operands: list[Tensor]) -> Tensor:
    return 2 * operands.pop()


def test_what_runs_beside_is_waited_for_when_it_is_wanted(computing: Stream) -> None:
    gpu, operand = GpuBackend(HERE, {}), torch.ones(3)
    gpu.begin()
    ended = gpu.run_async(doubled, [operand])
    assert not computing.waited
    assert is_shared(operand), "or it would be overwritten while it is read"
    assert torch.equal(ended(), torch.full((3,), 2.0))
    (done,) = computing.waited
    assert done.stream.waited == [computing], "what was computed before"
    assert not is_shared(operand)


def test_few_may_be_behind(computing: Stream) -> None:
    gpu, operands = GpuBackend(HERE, {}), [torch.ones(3) for _ in range(BEHIND + 2)]
    gpu.begin()
    ends = [gpu.run_async(doubled, [operand]) for operand in operands]
    assert [is_shared(operand) for operand in operands] == [False, False, *[True] * BEHIND]
    ends[-1]()
    assert not any(map(is_shared, operands)), "ends come in order"
