"""A program trains at once, op by op, and changes over to compiled functions between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.conftest import Script

TRAINING = """
import time

import torch
from torch import nn

from moaic.compile import step as steps
from moaic.compile.step import Step

modes = []
for name in ("_try_joint", "_try_forward", "_try_backward"):
    def ran(self, call, *rest, name=name, run=getattr(Step, name)):
        result = run(self, call, *rest)
        modes.append((name, call.op_by_op))
        return result
    setattr(Step, name, ran)


class Loss(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))

    def forward(self, x):
        return self.inner(x).square().mean()


def train(width):
    torch.compiler.reset()
    torch.manual_seed(0)
    modes.clear()
    host, model = Loss(width), Loss(width)
    model.load_state_dict(host.state_dict())
    model.to("moai")
    compiled = torch.compile(model, backend="moai", options={"dp": 2})
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (host, model)]
    until = time.monotonic() + 100
    step = last = 0
    while step < last + 4 and time.monotonic() < until:
        x = torch.randn(8, 16)
        losses = []
        for call, optimizer, given in ((host, optimizers[0], x), (compiled, optimizers[1], x.to("moai"))):
            loss = call(given)
            if step % 2:
                loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert abs(losses[0] - losses[1]) < 1e-6, (step, losses)
        if any(op_by_op for _, op_by_op in modes[-2:]):
            last = step
            time.sleep(0.3)  # leaves the cores to the processes that compile
        step += 1
    halves = [mode for name, mode in modes if name != "_try_joint"]
    assert halves[::2] == halves[1::2], modes
    print("op by op" if modes[0][1] else "compiled", "then", "op by op" if modes[-1][1] else "compiled", flush=True)


"""

FIRST = "train(32)"

LATER = """
train(32)
torch.use_deterministic_algorithms(True)
train(48)
torch.use_deterministic_algorithms(False)
steps.fits_op_by_op = lambda *given: False
train(64)
"""
"""The first program again, and two that are in no cache: in equal steps, and without memory for steps op by op."""


def lines(script: Script, cache: Path, calls: str) -> list[str]:
    """What a training program with this cache prints."""
    words = script.start(TRAINING + calls, TORCHINDUCTOR_CACHE_DIR=str(cache), MOAI_COMPILE="1", MOAI_LOG="info")
    return [" ".join(words), *script.finish().splitlines()]


@pytest.mark.timeout(300)
def test_a_program_changes_over_between_steps(script: Script, tmp_path: Path) -> None:
    """What is in the cache on disk, must be equal in every run or fits only with fused kernels is compiled at first."""
    printed = lines(script, tmp_path, FIRST)
    assert "op by op then compiled" in printed
    # One line for the joint program and one for the two halves.
    assert sum("A program is compiled now: " in line for line in printed) == 2
    printed = lines(script, tmp_path, LATER)
    assert [line for line in printed if " then " in line] == ["compiled then compiled"] * 3
