"""Batches of many shapes: a second shape opens the sizes of the program, and further ones are planned no more."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from moaic.compile import backend
from moaic.compile.planning import Planning
from moaic.ir.graph import Module
from moaic.passes.lowering.plan import Plan
from tests.exact.example import Batch
from tests.exact.training import PLANS, compiled
from tests.exact.training import Plan as Asked
from tests.loops.compare import grads, same
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
def captures() -> Iterator[Mock]:
    """The captures of graphs."""
    with patch.object(backend, "capture_backend", side_effect=backend.capture_backend) as capture:
        yield capture


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


@pytest.mark.parametrize(
    "asked", [*(pytest.param(each, marks=pytest.mark.exact) for each in ("dp2", "tp2")), "use", "pp2"]
)
def test_many_shapes_train_as_on_the_host(asked: str, planned: list[str]) -> None:
    train(PLANS[asked], SHAPES, when=False)
    # For one shape, for all, and twice more: what needs even rows cannot serve odd ones.
    assert len(planned) <= 4


@pytest.mark.parametrize("when", ["wait", pytest.param(True, marks=pytest.mark.exact)])
def test_they_do_by_compiled_functions_too(planned: list[str], when: object) -> None:
    train(PLANS["dp2"], SHAPES[:8], when=when)
    assert len(planned) <= 3


def test_a_smaller_last_batch_needs_no_capture(captures: Mock, planned: list[str]) -> None:
    train(PLANS["dp2"], [(8, 6), (8, 4), (8, 5), (6, 5)], when=False)
    assert captures.call_count == len(planned) == 2


def test_an_odd_last_batch_gets_a_plan_without_a_capture(captures: Mock, planned: list[str]) -> None:
    train(PLANS["dp2"], [(8, 6), (8, 4), (5, 5)], when=False)
    assert captures.call_count == 2
    assert len(planned) == 3


def test_the_log_says_why_sizes_need_another_program(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moaic.support.logging_setup.install", print)
    with caplog.at_level(logging.INFO, "moaic"):
        train(PLANS["dp2"], [(8, 6), (6, 6), (5, 6)], when=False)
    (line,) = [text for text in caplog.messages if text.startswith("Sizes ")]
    assert line == "Sizes s0 = 5 get a program of their own: the last one is for sizes where s0 is a multiple of 2."


class SquaredError(nn.Module):
    """The gradient of its mean divides by a number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.linear(x), x)


def test_quotients_of_open_sizes_have_a_rule(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moaic.support.logging_setup.install", print)
    torch.compiler.reset()
    host, model = SquaredError(), SquaredError().to("moai")
    model.load_state_dict(host.state_dict())
    call = compiled(model, PLANS["dp2"], compile=False)
    with caplog.at_level(logging.WARNING, "moaic"):
        for rows, length in ((8, 6), (6, 5), (4, 7)):
            x = torch.randn(rows, length, 4)
            host(x=x).backward()
            call(x=x).backward()
    assert not [line for line in caplog.messages if "no sharding rule" in line]
    same(grads(model), grads(host), 1e-4)


def train(asked: Asked, shapes: Sequence[tuple[int, int]], *, when: object) -> None:
    torch.compiler.reset()
    data = batches(shapes)
    host, model = TINY.model(), TINY.model().to("moai")
    found = trained(model, compiled(model, asked, compile=when), data)
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


@pytest.mark.parametrize("compiled_functions", [False, pytest.param(True, marks=pytest.mark.exact)])
def test_numbers_and_views_follow_the_sizes(compiled_functions: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    host = Statistics()
    model = Statistics()
    model.load_state_dict(host.state_dict())
    model.to("moai")
    call = torch.compile(model, backend="moai", options={"dp": 1, "compile": "wait" if compiled_functions else False})
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


def _last(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).flip(0)[:, None]


def _classed(x: Tensor) -> Tensor:
    """A token more in front, then pairs."""
    h = torch.cat([x[:, :1] * 2, x], 1)
    return h.view(h.shape[0], h.shape[1] // 2, -1).relu()


def _windowed(x: Tensor) -> Tensor:
    """Attention that sees four tokens back, which matters for long texts alone."""
    at = torch.arange(x.shape[1], device=x.device)
    seen = (at[None, :] <= at[:, None]) & (at[:, None] - at[None, :] < 4)
    q = x.unsqueeze(1)
    return scaled_dot_product_attention(q, q, q, attn_mask=seen)


FORMULAS: Mapping[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "a root": (lambda x: torch.add(x, x, alpha=x.shape[1] ** 0.5), (6, 8, 7, 9, 13)),
    "a root in a constant": (lambda x: x + torch.full((x.shape[1], 1), 1 / math.sqrt(x.shape[1])).to(x), (6, 8, 7, 13)),
    "a logarithm": (lambda x: x.clamp(max=math.log(x.shape[1]) / 10), (6, 8, 7, 9)),
    "a power": (lambda x: x + _last(x) * (1 / (x.shape[1] + 1)) ** 2, (6, 8, 7, 9)),
    "half of more": (_classed, (5, 7, 3, 9, 5)),
    "padded to a length": (lambda x: pad(x, (0, 0, 0, 16 - x.shape[1])), (4, 6, 16, 5)),
    "padded in front": (lambda x: pad(x, (0, 0, 12 - x.shape[1], 0)), (4, 6, 12, 5)),
    "padded on both sides": (lambda x: pad(x, (0, 0, (7 - x.shape[1]) // 2, (7 - x.shape[1]) // 2)), (4, 5, 6, 3)),
    "the first of them": (lambda x: x[:, : torch.sym_min(x.shape[1], 8)], (5, 6, 7, 9, 10, 8)),
    "every second": (lambda x: x[:, ::2], (6, 8, 7, 9, 4)),
    "two chunks": (lambda x: torch.stack(x.chunk(2, 1)).sum(0), (6, 8, 4, 10)),
    "a range": (lambda x: x * torch.linspace(0, 1, x.shape[1], device=x.device)[:, None], (6, 8, 7)),
    "a window": (_windowed, (3, 4, 2, 7, 9, 3)),
}
"""What people compute from a length: of x[rows, length, 4], at these lengths."""


class Formula(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.formula, self.lengths = FORMULAS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self.inner(x))


@pytest.mark.parametrize("name", FORMULAS)
def test_what_people_compute_from_a_length(name: str) -> None:
    follow(name, compiled_functions=False)


@pytest.mark.parametrize(
    "name",
    ["half of more", *(pytest.param(name, marks=pytest.mark.exact) for name in ("a root", "padded to a length"))],
)
def test_compiled_functions_do_so_too(name: str) -> None:
    follow(name, compiled_functions=True)


def follow(name: str, *, compiled_functions: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    host, model = Formula(name), Formula(name)
    model.load_state_dict(host.state_dict())
    model.to("moai")
    call = torch.compile(model, backend="moai", options={"dp": 2, "compile": "wait" if compiled_functions else False})
    for length in host.lengths:
        x = torch.randn(2, length, 4)
        results: list[list[Tensor]] = []
        for run, who, given in ((call, model, x.to("moai")), (host, host, x)):
            found = run(given)
            (found * found).sum().backward()
            results.append([found.detach().cpu(), *(p.grad.cpu() for p in who.parameters() if p.grad is not None)])
            who.zero_grad()
        same(results[0], results[1], 1e-4)


class Labelled(nn.Module):
    """The loss of the next token: rows and lengths of tokens and labels are sizes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor, labels: Tensor, scale: int = 1) -> Tensor:
        logits = self.head(x)[:, :-1] * scale
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("asked", [{"dp": 2}, {"tp": 2}, {}])
def test_rows_and_length_change_together(asked: dict[str, int], planned: list[str]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    host, model = Labelled(), Labelled()
    model.load_state_dict(host.state_dict())
    model.to("moai")
    call = torch.compile(model, backend="moai", options={**asked, "compile": False})
    for scale, (rows, length) in zip(
        (1, 2, 3, -4, -5, 2), [(2, 5), (4, 7), (6, 3), (2, 9), (8, 8), (4, 6)], strict=True
    ):
        x, labels = torch.randn(rows, length, 4), torch.randint(10, (rows, length))
        losses: list[Tensor] = [call(x.to("moai"), labels.to("moai"), scale), host(x, labels, scale)]
        for loss in losses:
            loss.backward()
        found, expected = ([loss.detach().cpu(), *grads(who)] for loss, who in zip(losses, (model, host), strict=True))
        same(found, expected, 1e-4)
    assert len(planned) <= 5
