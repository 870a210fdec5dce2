"""Functions that reach no parameter run op by op after a graph break; those that reach one are captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import CellType, FrameType, FunctionType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from moaic.option.data_functions import works_on_data_alone

MODEL = nn.Linear(2, 1)
STATELESS = nn.ReLU()


def caller() -> FrameType:
    """The frame of the function that calls this one."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back


def frame_of(*values: Any, **named: Any) -> FrameType:
    return caller()


def frame_around(function: Callable[..., Any]) -> FrameType:
    def call() -> FrameType:
        assert callable(function)
        return caller()

    return call()


def frame_beside_a_global() -> FrameType:
    assert MODEL is not None
    return caller()


def frame_beside_another_global() -> FrameType:
    assert STATELESS is not None
    return caller()


def frame_of_a_comprehension() -> FrameType:
    return next(caller() for _ in range(1))


def reading(value: object) -> FunctionType:
    def read() -> object:
        return value

    return cast("FunctionType", read)


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(),
        frame_of(torch.ones(2), [1, None, "word"], width=2.0),
        frame_of({"boxes": [torch.ones(2)]}, STATELESS),
        frame_of(SimpleNamespace(size=3, matcher=STATELESS)),
        frame_of([[[0] * 500] * 500] * 500),
        frame_of(torch, nn.Linear, len, partial(max, 1), FunctionType(reading(0).__code__, {}, closure=(CellType(),))),
        frame_around(len),
        frame_beside_another_global(),
    ],
)
def test_data(frame: FrameType) -> None:
    assert works_on_data_alone(frame)


@pytest.mark.parametrize(
    "frame",
    [
        frame_of(MODEL),
        frame_of(layers=[STATELESS, MODEL]),
        frame_of(nn.Parameter(torch.ones(2))),
        frame_of({"head": {"weights": MODEL}}),
        frame_of(MODEL.forward),
        frame_of(partial(MODEL, input=torch.ones(2))),
        frame_of(SimpleNamespace(model=MODEL)),
        frame_of(iter([MODEL])),
        frame_around(MODEL.forward),
        frame_around(lambda: MODEL),
        frame_around(reading(MODEL)),
        frame_beside_a_global(),
        frame_of_a_comprehension(),
    ],
)
def test_what_reaches_parameters(frame: FrameType) -> None:
    assert not works_on_data_alone(frame)


class Detector(nn.Module):
    """Its loss depends on values that the host reads, and has other sizes for each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: Tensor, targets: Sequence[Tensor]) -> Tensor:
        return matched(self.layers(x), targets)


def matched(found: Tensor, targets: Sequence[Tensor]) -> Tensor:
    """The mean distance of each target from the box that is closest to it."""
    losses: list[Tensor] = []
    for boxes, wanted in zip(found, targets, strict=True):
        if not len(wanted):
            continue
        closest = [int(place.item()) for place in distances(boxes, wanted).argmin(0)]
        losses += [(boxes[place] - target).abs().mean() for place, target in zip(closest, wanted, strict=True)]
    return torch.stack(losses).mean()


def distances(boxes: Tensor, wanted: Tensor) -> Tensor:
    return (boxes[:, None] - wanted[None]).abs().sum(-1)


def trained(device: str) -> list[float]:
    torch.manual_seed(0)
    model = Detector().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for counts in ((2, 3), (1, 4), (3, 0), (5, 2)):
        targets = [torch.randn(count, 4).to(device) for count in counts]
        loss = model(torch.randn(2, 6, 8).to(device), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("mode")
def test_a_loss_that_breaks_the_graph_is_captured_for_no_batch_of_its_own() -> None:
    wanted = trained("cpu")
    before = counters["stats"]["unique_graphs"]
    assert trained("cuda") == pytest.approx(wanted, rel=1e-5)
    assert counters["stats"]["unique_graphs"] - before <= 2
