"""Calls of captured models end with their graph."""

from __future__ import annotations

import torch
from torch import nn

from tests.capture.compiler import WARNINGS, Compiler

pytestmark = WARNINGS


def test_a_second_backward_reaches_the_engine(compiler: Compiler) -> None:
    model = nn.Linear(4, 3)
    loss = compiler(model)(torch.randn(2, 4)).square().sum()
    loss.backward(retain_graph=True)
    assert model.weight.grad is not None
    once = model.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.weight.grad, 2 * once)


def test_a_call_ends_with_its_graph(compiler: Compiler) -> None:
    model = nn.Linear(4, 3)
    compiled = compiler(model)
    kept, lost = compiled(torch.randn(2, 4)), compiled(torch.randn(2, 4))
    calls = compiler.engines[0].calls
    assert len(calls) == 2
    del lost
    assert len(calls) == 1
    kept.sum().backward()
    assert len(calls) == 0


def test_a_call_lives_while_its_graph_is_retained(compiler: Compiler) -> None:
    loss = compiler(nn.Linear(4, 3))(torch.randn(2, 4)).sum()
    loss.backward(retain_graph=True)
    assert len(compiler.engines[0].calls) == 1
    loss.backward()
    assert len(compiler.engines[0].calls) == 0


def test_an_inference_keeps_no_call(compiler: Compiler) -> None:
    with torch.no_grad():
        result = compiler(nn.Linear(4, 3))(torch.randn(2, 4))
    assert result.shape == (2, 3)
    assert len(compiler.engines[0].calls) == 0
