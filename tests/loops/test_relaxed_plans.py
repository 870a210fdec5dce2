"""A requested plan is relaxed for a batch or a piece of a model that cannot follow it; results are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import graph_break

from tests.exact.example import Batch
from tests.exact.training import PLAIN, PLANS, Call, Plan, compiled
from tests.loops.compare import Found, grads, same, weights
from tests.loops.tiny import TINY


def trained(model: nn.Module, call: Call, data: Sequence[Batch]) -> Found:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses: list[Tensor] = []
    for batch in data:
        loss = call(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *weights(model)]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [line for line in found if "cannot follow" in line]


ASKED: Mapping[str, Plan] = {
    "dp=2": {"dp": 2},
    "micro_batches=2": {"micro_batches": 2},
    "everything": PLANS["dp2_mb2"],
    "distributed": PLANS["use"],
    "pipeline": {**PLANS["pp2"], "tp": None},
}


@pytest.mark.parametrize("asked", ["dp=2", "distributed", "pipeline"])
def test_a_last_batch_that_does_not_divide_is_trained_on(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    train_on(asked, caplog)


@pytest.mark.exact
@pytest.mark.parametrize("asked", ASKED)
def test_it_is_under_every_plan(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    train_on(asked, caplog)


def train_on(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    """The second size that Dynamo sees, so a graph of its own; the third comes to the same graph."""
    torch.compiler.reset()
    data = [TINY.batch(seed, rows) for seed, rows in enumerate((8, 5, 8, 3))]
    host, model = TINY.model(), TINY.model().to("moai")
    found = trained(model, compiled(model, ASKED[asked], compile=False), data)
    same(found, trained(host, host, data), 1e-4)
    (line,) = warnings(caplog)
    assert line.startswith("A later batch cannot follow ")
    assert "does not divide a batch of 5" in line


def test_a_last_length_that_does_not_divide_is_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    data = [TINY.batch(0), {name: tensor[:, :5] for name, tensor in TINY.batch(1).items()}]
    host, model = TINY.model(), TINY.model().to("moai")
    found = trained(model, compiled(model, {**PLAIN, "cp": 2}, compile=False), data)
    same(found, trained(host, host, data), 1e-4)
    (line,) = warnings(caplog)
    assert line.startswith("A later batch cannot follow cp=2 and runs under dp=1, with the same result: cp=2 does not")


def test_the_first_batch_of_a_model_is_refused_what_it_cannot_follow() -> None:
    """And the next one too, as long as none has been planned."""
    torch.compiler.reset()
    model = TINY.model().to("moai")
    call = compiled(model, {"dp": 2}, compile=False)
    for seed in range(2):
        with pytest.raises(Exception, match="dp=2 makes 2 parts of a batch of 1"):
            call(**TINY.batch(seed, 1))


def test_a_first_batch_that_does_not_divide_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    data = [TINY.batch(seed, 7) for seed in range(3)]
    host, model = TINY.model(), TINY.model().to("moai")
    found = trained(model, compiled(model, ASKED["everything"], compile=False), data)
    same(found, trained(host, host, data), 1e-4)
    assert not warnings(caplog)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Joined(nn.Module):
    """Takes in one picture beside a batch of tokens, in graphs of their own, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(6, 16)
        self.embed = nn.Embedding(24, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(16, 24)

    def forward(self, picture: Tensor, ids: Tensor) -> Tensor:
        seen = self.seen(picture).relu()
        graph_break()
        x = self.embed(ids) + seen
        graph_break()
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()


class Looped(Joined):
    """Breaks in a loop, so that Dynamo leaves this function alone and compiles what it calls."""

    def forward(self, picture: Tensor, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.seen(picture)
        for layer in self.layers:
            graph_break()
            x = layer(layer(x[:1])) + x
        return self.head(x).logsumexp(-1).mean()


def joined(kind: type[Joined]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def steps(model: nn.Module, call: Callable[..., Tensor], rows: Sequence[int] = (4,)) -> Found:
    found: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    where = next(model.parameters()).device
    for count in rows:
        picture = torch.randn(1, 6, generator=generator)
        ids = torch.randint(24, (count, 5), generator=generator)
        loss = call(picture.to(where), ids.to(where))
        loss.backward()
        found += [loss.detach(), *grads(model)]
    return found


def in_pieces(kind: type[Joined], asked: Mapping[str, object], rows: Sequence[int]) -> None:
    """Trains a model that breaks into graphs, and compares."""
    torch.compiler.reset()
    host, model = joined(kind), joined(kind).to("moai")
    settings: Any = {**asked, "compile": False}
    same(steps(model, torch.compile(model, backend="moai", options=settings), rows), steps(host, host, rows))


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
@pytest.mark.parametrize("asked", ["dp=2", "micro_batches=2"])
def test_a_model_in_pieces_takes_of_a_plan_what_each_can(asked: str, caplog: pytest.LogCaptureFixture) -> None:
    """The picture's graph has one row; the others have four, and then three."""
    in_pieces(Joined, ASKED[asked], (4,))
    (line,) = warnings(caplog)
    assert line.startswith("The graph at test_relaxed_plans.py:")
    assert line.endswith("with the same result: the first tensor that it is given has 1 rows")
    assert f"cannot follow {asked} and" in line


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
def test_a_last_batch_of_a_model_in_pieces_is_said_once_for_each(caplog: pytest.LogCaptureFixture) -> None:
    in_pieces(Joined, ASKED["dp=2"], (4, 3, 5))
    lines = warnings(caplog)
    assert len(lines) == len({line.split(" cannot ")[0] for line in lines}) == 3


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
def test_what_is_called_by_a_function_that_broke_is_a_piece(caplog: pytest.LogCaptureFixture) -> None:
    in_pieces(Looped, ASKED["dp=2"], (4,))
    (line,) = warnings(caplog)
    assert "has 1 rows" in line


@pytest.mark.filterwarnings("ignore")  # of Dynamo, about itself
def test_no_piece_relaxes_what_no_batch_could_follow() -> None:
    torch.compiler.reset()
    model = joined(Joined).to("moai")
    with pytest.raises(Exception, match="dp=3 needs 3 workers, there are 2"):
        steps(model, torch.compile(model, backend="moai", options={"dp": 3, "compile": False}))
