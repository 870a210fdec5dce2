"""The side stream of an emulated GPU: in order, late, and without a reference to its operands."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from moaic.runtime.comm.device_backend import BEHIND
from moaic.runtime.comm.reshard import is_shared, owned
from moaic.runtime.emulation import side_stream
from moaic.runtime.emulation.side_stream import SideStream


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    monkeypatch.setattr(side_stream, "DELAYS", (0.02,))
    return SideStream()


def doubled(operands: list[Tensor]) -> list[Tensor]:
    return [2 * operands.pop()]


def in_place(operands: list[Tensor]) -> list[Tensor]:
    return [owned(operands.pop(), free=True).mul_(2)]


def test_work_is_late_and_in_order(stream: SideStream) -> None:
    done: list[int] = []

    def noting(number: int) -> None:
        def run(operands: list[Tensor]) -> list[Tensor]:
            done.append(number)
            return operands

        waits.append(stream.start(run, [torch.ones(2)]))

    waits: list[object] = []
    for number in range(BEHIND):
        noting(number)
    assert not done
    noting(BEHIND)
    assert done[0] == 0, "only so many are in flight"
    stream.wait()
    assert done == [*range(BEHIND + 1)]


def test_operands_are_held_until_it_is_waited_for(stream: SideStream) -> None:
    operand = torch.ones(3)
    wait = stream.start(doubled, [operand])
    assert is_shared(operand), "or it would be overwritten while it is read"
    assert wait()[0].tolist() == [2, 2, 2]
    assert not is_shared(operand)


def test_the_thread_holds_nothing(stream: SideStream) -> None:
    operand = torch.ones(3)
    wait = stream.start(doubled, [operand])
    (work,) = stream._behind  # pyright: ignore[reportPrivateUsage]
    work.operands.clear()
    assert not is_shared(operand)
    operand.fill_(5)
    assert wait()[0].tolist() == [10, 10, 10], "what is there when the kernel runs"


def test_a_result_in_place_keeps_the_memory(stream: SideStream) -> None:
    operand = torch.ones(3)
    wait = stream.start(in_place, [operand])
    (result,) = wait()
    assert result.tolist() == operand.tolist() == [2, 2, 2]
    assert is_shared(operand)


def test_shared_memory_is_not_written(stream: SideStream) -> None:
    operand = torch.ones(3)
    other = operand.view(3)
    (result,) = stream.start(in_place, [operand])()
    assert result.tolist() == [2, 2, 2]
    assert other.tolist() == [1, 1, 1]


def test_strided_and_empty_operands(stream: SideStream) -> None:
    whole = torch.arange(12.0).view(3, 4)
    (turned,) = stream.start(doubled, [whole[1:, ::2].T])()
    assert turned.tolist() == [[8, 16], [12, 20]]
    (nothing,) = stream.start(doubled, [whole[:0]])()
    assert nothing.shape == (0, 4)


def test_what_is_raised_there_is_raised_where_it_is_waited_for(stream: SideStream) -> None:
    def fails(operands: list[Tensor]) -> list[Tensor]:
        raise ValueError("no peer")

    wait = stream.start(fails, [])
    time.sleep(0.03)
    with pytest.raises(ValueError, match="no peer"):
        wait()
