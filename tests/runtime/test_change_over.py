"""A program trains at once, op by op, and changes over to compiled functions between two steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.conftest import Script

TRAINING = """
import sys
import time

import torch
from torch import nn

from moaic.compile.step import Step

torch.manual_seed(0)
host = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
model.load_state_dict(host.state_dict())
model.to("moai")


class Loss(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).square().mean()


host, model = Loss(host), Loss(model)
modes = []
for name in ("_try_joint", "_try_forward", "_try_backward"):
    def ran(self, call, *rest, name=name, run=getattr(Step, name)):
        result = run(self, call, *rest)
        modes.append((name, call.op_by_op))
        return result
    setattr(Step, name, ran)
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
    step += 1
halves = [mode for name, mode in modes if name != "_try_joint"]
assert halves[::2] == halves[1::2], modes
print("op by op" if modes[0][1] else "compiled", "then", "op by op" if modes[-1][1] else "compiled")
"""


def train(script: Script, cache: Path, text: str = TRAINING) -> str:
    """What a training program with this cache prints."""
    words = script.start(text, TORCHINDUCTOR_CACHE_DIR=str(cache), MOAI_COMPILE="1", MOAI_LOG="info")
    return " ".join(words) + "\n" + script.finish()


@pytest.mark.timeout(300)
def test_a_program_changes_over_between_steps(script: Script, tmp_path: Path) -> None:
    printed = train(script, tmp_path / "cache")
    assert "op by op then compiled" in printed
    # One line for the joint program and one for the two halves.
    assert printed.count("A program is compiled now: ") == 2
    # What is in the cache on disk is there from the first step on.
    assert "compiled then compiled" in train(script, tmp_path / "cache")


@pytest.mark.timeout(300)
def test_steps_that_must_be_equal_in_every_run_are_all_compiled(script: Script, tmp_path: Path) -> None:
    text = f"import torch\ntorch.use_deterministic_algorithms(True)\n{TRAINING}"
    assert "compiled then compiled" in train(script, tmp_path / "cache", text)


@pytest.mark.timeout(300)
def test_what_fits_in_memory_only_with_fused_kernels_is_compiled_first(script: Script, tmp_path: Path) -> None:
    text = f"from moaic.compile import step\nstep.fits_op_by_op = lambda *given: False\n{TRAINING}"
    assert "compiled then compiled" in train(script, tmp_path / "cache", text)
