"""The trace of a user's error has the user's lines, and one of moaic's."""

from __future__ import annotations

import re

import pytest

from tests.tools.conftest import Person

SCRIPT = """
import torch

x = torch.ones(4, device="moai")


def taken():
    y = x[torch.tensor([9])]
    return y.cpu()


taken()
"""


@pytest.mark.parametrize("asked", [{}, {"MOAI_TRACEBACK": "full"}])
def test_a_trace_has_one_line_of_moaic(person: Person, asked: dict[str, str]) -> None:
    program = person.start(SCRIPT, MOAI_LOG="warning", **asked)
    _, said = program.communicate(timeout=60)
    assert program.returncode == 1
    frames = [line for line in said.splitlines() if line.startswith('  File "')]
    ours = [line for line in frames if "/moaic/" in line]
    theirs = [line for line in frames if "train.py" in line]
    assert len(theirs) == 2
    if asked:
        assert len(ours) > 1
        assert "are left out" not in said
    else:
        assert len(ours) == 1
        assert "frames of moaic are left out; MOAI_TRACEBACK=full shows them" in said
    assert "aten.index.Tensor" in said.splitlines()[-1]


LOGGED = """
import logging, traceback
import torch
from torch import nn

x = torch.ones(4, device="moai")
model = nn.Embedding(4, 4).to("moai")
compiled = torch.compile(model, backend="moai")


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given * 2

    @staticmethod
    def backward(ctx, grad):
        return grad + x[:3]


MISTAKES = [
    lambda: x[torch.tensor([9])].cpu(),
    lambda: x + torch.ones(3, device="moai"),
    lambda: x + torch.ones(4),
    lambda: compiled(torch.tensor([7], device="moai")).sum().item(),
    lambda: Doubled.apply(x.clone().requires_grad_()).sum().backward(),
    lambda: torch.compile(model, backend="moai", options={"dp": 3}),
    lambda: torch.compile(model, backend="moai", options={"cp": 2})(torch.tensor([[1, 2, 3]], device="moai")),
]
for number, mistake in enumerate(MISTAKES):
    print("---", number)
    try:
        mistake()
    except Exception:
        logging.exception("logged")
        print(traceback.format_exc())
print("---")
"""


@pytest.mark.parametrize("asked", [{}, pytest.param({"MOAI_TRACEBACK": "full"}, marks=pytest.mark.exact)])
def test_a_trace_that_the_program_logs_has_one_line_of_moaic(person: Person, asked: dict[str, str]) -> None:
    program = person.start(LOGGED, MOAI_FLAVOR="2", MOAI_LOG="error", **asked)
    printed, logged = program.communicate(timeout=120)
    assert program.returncode == 0, logged
    traces = [*printed.split("---")[1:-1], *logged.split("ERROR:root:logged")[1:]]
    assert len(traces) == 14
    for trace in traces:
        frames = re.findall(r'^  File "(.*)", line', trace, re.MULTILINE)
        assert any(file.endswith("train.py") for file in frames), trace
        ours = [file for file in frames if "/moaic/" in file]
        assert len(ours) > 1 if asked else len(ours) == 1, trace
