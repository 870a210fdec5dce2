"""Batches of many shapes: a second shape opens the sizes of the program, and further ones are planned no more."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from moaic.compile.planning import Planning
from moaic.ir.graph import Module
from moaic.passes.lowering.plan import Plan
from tests.exact.models import Batch
from tests.exact.training import PLANS, compiled
from tests.exact.training import Plan as Asked
from tests.loops.compare import same
from tests.loops.test_relaxed_plans import trained
from tests.loops.tiny import TINY

SHAPES = [(8, 6), (8, 4), (8, 5), (8, 3), (4, 6), (6, 4), (2, 3), (8, 2), (4, 5), (6, 6), (5, 4), (3, 6)]
"""Rows and length of each batch; the last two are odd."""


def batches(shapes: Sequence[tuple[int, int]]) -> list[Batch]:
    return [
        {name: tensor[:, :length] for name, tensor in TINY.batch(seed, rows).items()}
        for seed, (rows, length) in enumerate(shapes)
    ]


@pytest.fixture
def planned() -> Iterator[list[str]]:
    """The plan of each step that is planned."""
    found: list[str] = []
    usual = Planning.plan

    def plan(self: Planning, step: Module) -> Plan:
        made = usual(self, step)
        found.append(str(made.config))
        return made

    with patch.object(Planning, "plan", plan):
        yield found


@pytest.mark.parametrize("asked", ["dp2", "use", "tp2", "pp2"])
def test_many_shapes_train_as_on_the_host(asked: str, planned: list[str]) -> None:
    train(PLANS[asked], SHAPES, compiled_functions=False)
    # For one shape, for lengths, for rows too, and twice more: what needs even rows cannot serve odd ones.
    assert len(planned) <= 5


def test_they_do_by_compiled_functions_too(planned: list[str]) -> None:
    train(PLANS["dp2"], SHAPES[:8], compiled_functions=True)
    assert len(planned) <= 4


def test_the_log_says_why_sizes_need_another_program(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaic.support.logging_setup.install", print)
    with caplog.at_level(logging.INFO, "moaic"):
        train(PLANS["dp2"], [(8, 6), (6, 6), (5, 6)], compiled_functions=False)
    (line,) = [text for text in caplog.messages if text.startswith("Sizes ")]
    assert line == "Sizes s0 = 5 get a program of their own: the last one is for sizes where s0 is a multiple of 2."


def train(asked: Asked, shapes: Sequence[tuple[int, int]], *, compiled_functions: bool) -> None:
    torch.compiler.reset()
    data = batches(shapes)
    host, model = TINY.model(), TINY.model().to("moai")
    found = trained(model, compiled(model, asked, compile=compiled_functions), data)
    same(found, trained(host, host, data), 1e-4)


def test_a_loss_that_is_read_first_and_a_second_backward(planned: list[str]) -> None:
    """The halves of a step, and the forward again, at sizes that are not the example's."""
    torch.compiler.reset()
    host, model = TINY.model(), TINY.model().to("moai")
    call = compiled(model, PLANS["dp2"], compile=False)
    for seed, (rows, length) in enumerate(SHAPES[:8]):
        batch = {name: tensor[:, :length] for name, tensor in TINY.batch(seed, rows).items()}
        found: list[Tensor] = []
        expected: list[Tensor] = []
        for run, who, results in ((call, model, found), (host, host, expected)):
            answer = run(**batch)
            results.append(answer.loss.detach().cpu().clone())
            answer.loss.backward(retain_graph=True)
            (answer.logits * answer.logits).sum().backward()
            results += [p.grad.cpu() for p in who.parameters() if p.grad is not None]
            who.zero_grad()
        same(found, expected, 1e-4)
    assert len(planned) <= 6


class Statistics(nn.Module):
    """Numbers that follow the sizes: an unbiased variance, a mean by hand, a mask, a slice, a view by half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, length, _ = x.shape
        h = self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2)
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(length // 3)
        scores = (h @ h.transpose(1, 2)).masked_fill(~seen, -1e4).softmax(-1)
        h = scores @ h + torch.arange(length, device=x.device)[None, :, None] / length
        return (h[:, 1:].sum() / (rows * (length - 1))) + h.var(), h[:, : length // 2]


@pytest.mark.parametrize("compiled_functions", [False, True])
def test_numbers_and_views_follow_the_sizes(compiled_functions: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    host = Statistics()
    model = Statistics()
    model.load_state_dict(host.state_dict())
    model.to("moai")
    call = torch.compile(model, backend="moai", options={"dp": 1, "compile": compiled_functions})
    for seed, (rows, length) in enumerate(SHAPES[: 6 if compiled_functions else 12]):
        x = torch.randn(rows, length + 2, 4, generator=torch.Generator().manual_seed(seed))
        results: list[list[Tensor]] = []
        for run, who, given in ((call, model, x.to("moai")), (host, host, x)):
            loss, part = run(given)
            loss.backward()
            results.append(
                [loss.detach().cpu(), part.detach().cpu()]
                + [p.grad.cpu().clone() for p in who.parameters() if p.grad is not None]
                + [b.cpu().clone().float() for b in who.buffers()]
            )
            who.zero_grad()
        same(results[0], results[1], 1e-4)


def test_an_evaluation_between_steps_builds_nothing_new(planned: list[str]) -> None:
    torch.compiler.reset()
    model = TINY.model().to("moai")
    call = compiled(model, PLANS["dp2"], compile=False)

    def epoch() -> None:
        for batch in batches(SHAPES[:4]):
            call(**batch).loss.backward()
        model.eval()
        with torch.no_grad():
            for batch in batches(SHAPES[:4]):
                call(**batch).loss.item()
        model.train()

    epoch()
    first = len(planned)
    epoch()
    assert len(planned) == first
