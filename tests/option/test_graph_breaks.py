"""Models whose call Dynamo captures in parts: each part runs once, as in plain PyTorch, whether or not it is traced."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

_dynamo: Any = torch._dynamo  # pyright: ignore[reportPrivateUsage]

pytestmark = pytest.mark.usefixtures("mode")


class Counted(nn.Module):
    """Counts its calls in each way that a model has, breaks the graph, and then uses an op that refuses its shapes."""

    def __init__(self, reads: bool, catches: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.reads, self.catches, self.steps = reads, catches, 0
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls += 1
        h = self.norm(x)
        if self.reads:
            self.log.append(h.abs().mean().item())
        else:
            self.log.append(0.0)
            _dynamo.graph_break()
        try:
            return self.out(h[:, :5])
        except RuntimeError:
            if not self.catches:
                raise
        return self.out(h)


@pytest.mark.parametrize("catches", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_an_op_that_refuses_its_shapes_runs_nothing_twice(reads: bool, catches: bool) -> None:
    plain = Counted(reads, catches)
    model = copy.deepcopy(plain).cuda()
    for _ in range(3):
        x = torch.randn(8, 6)
        with torch.no_grad():
            if catches:
                torch.testing.assert_close(model(x.cuda()).cpu(), plain(x))
                continue
            for each, given in ((model, x.cuda()), (plain, x)):
                with pytest.raises(RuntimeError, match="8") as raised:
                    each(given)
                assert type(raised.value) is RuntimeError
    torch.testing.assert_close(dict(model.cpu().state_dict()), dict(plain.state_dict()))
    assert (model.steps, len(model.log), model.calls.item()) == (3, 3, 3)
    assert model.log == pytest.approx(plain.log)


class Choosing(nn.Module):
    """Tries a shape that its input may not have, after it has read a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        scale = h.detach().abs().mean().item()
        try:
            return self.out(h[:, :5]) * scale
        except RuntimeError:
            return self.out(h) * scale


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks there, and hides the warning
def test_a_part_that_runs_op_by_op_has_gradients_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    plain = Choosing()
    model = copy.deepcopy(plain).cuda()
    for _ in range(2):
        x = torch.randn(8, 6)
        for each, given in ((model, x.cuda()), (plain, x)):
            each(given).square().sum().backward()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), wanted.grad)
    assert len([line for line in caplog.messages if "runs op by op from now on" in line]) == 1


def test_a_mistake_in_one_call_leaves_the_model_compiled(caplog: pytest.LogCaptureFixture) -> None:
    model = Choosing().cuda()
    with pytest.raises(RuntimeError, match="5"):
        model(torch.ones(8, 5).cuda())
    assert "runs op by op from now on" not in caplog.text


def lines_of(stderr: str) -> list[str]:
    """Without that of a PyTorch built for CUDA on a machine that has none."""
    return [line for line in stderr.splitlines() if "No CUDA runtime is found" not in line]


NOISY = """
import random, sys, torch

class Noisy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(3, 3)

    def forward(self, x):
        if x.sum().item() > 0 and random.random() < 2:
            return self.out(x)

model = Noisy().cuda()
model(torch.ones(2, 3).cuda())
try:
    model(torch.ones(2, 4).cuda())
except RuntimeError:
    print("caught")

print("ASKED", file=sys.stderr, flush=True)
try:
    torch.compile(torch.nn.Linear(3, 3), backend="eager")(torch.ones(2, 4))
except RuntimeError:
    print("caught")
"""

ON_SHAPES = "failed while attempting to run meta"


@pytest.mark.parametrize(("name", "value"), [("MOAI_LOG", "warning"), ("TORCH_LOGS", "dynamo")])
def test_dynamo_is_silent_where_nobody_asked_for_it(name: str, value: str) -> None:
    """A graph breaks at a number and at a builtin, and an op refuses its shapes: no line, unless TORCH_LOGS is set."""
    here = {**os.environ, "MOAI_ENABLE_ADVANCED_PARALLELIZATION": "1", "MOAI_LOG": "warning", name: value}
    ran = subprocess.run([sys.executable, "-c", NOISY], env=here, capture_output=True, text=True, check=True)
    assert ran.stdout == "caught\ncaught\n"
    unasked, _, asked = ran.stderr.partition("ASKED\n")
    if name == "TORCH_LOGS":
        assert all(part in unasked for part in ("Graph break from", "does not know how to trace", ON_SHAPES))
    else:
        assert not lines_of(unasked)
    assert ON_SHAPES in asked


DRAWN = """
import torch
from torch import distributions, nn

class Drawn(nn.Module):
    def __init__(self, sign):
        super().__init__()
        self.mean, self.sign = nn.Linear(3, 2), sign

    def forward(self, x):
        mean = self.mean(x)
        drawn = distributions.Normal(mean, self.sign * mean.exp())
        value = drawn.rsample()
        return value.sum() + drawn.log_prob(value).sum()

model, x = Drawn(1).cuda(), torch.ones(2, 3).cuda()
for _ in range(2):
    model(x).backward()
assert model.mean.weight.grad.isfinite().all()
for wrong in (lambda: Drawn(-1).cuda()(x), lambda: distributions.Normal(x, -x)):
    try:
        wrong()
    except ValueError as error:
        print("Expected parameter scale" in str(error))
"""


def test_distributions_check_their_arguments() -> None:
    """In and outside of compiled models, as Dynamo, which the program did not ask for, changes nothing for it."""
    here = {**os.environ, "MOAI_ENABLE_ADVANCED_PARALLELIZATION": "1", "MOAI_LOG": "warning"}
    ran = subprocess.run([sys.executable, "-c", DRAWN], env=here, capture_output=True, text=True, check=False)
    assert (ran.stdout, lines_of(ran.stderr)) == ("True\nTrue\n", [])
