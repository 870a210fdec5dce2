from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from moaic.option.transformers_adamw import AdamW

STEPS = 4


def run(make: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> list[float]:
    torch.manual_seed(0)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    unused = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    optimizer = make([weight, unused])
    for _ in range(STEPS):
        optimizer.zero_grad()
        (weight**2 + weight.sin()).sum().backward()
        optimizer.step()
    assert unused.item() == 0
    return [float(each) for each in weight.detach()]


def test_without_eps_and_decay_it_is_adam() -> None:
    found = run(lambda weights: AdamW(weights, lr=0.1, eps=0.0))
    assert found == pytest.approx(run(lambda weights: torch.optim.Adam(weights, lr=0.1, eps=0.0)), rel=1e-12)


@pytest.mark.parametrize("correct_bias", [True, False])
def test_one_step_by_hand(correct_bias: bool) -> None:
    weight = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    optimizer = AdamW([weight], lr=0.1, betas=(0.8, 0.9), eps=0.5, weight_decay=0.01, correct_bias=correct_bias)
    weight.grad = torch.tensor([3.0], dtype=torch.float64)
    optimizer.step()
    mean, square = 0.2 * 3, 0.1 * 9
    rate = 0.1 * math.sqrt(1 - 0.9) / (1 - 0.8) if correct_bias else 0.1
    stepped = 2.0 - rate * mean / (math.sqrt(square) + 0.5)
    assert weight.item() == pytest.approx(stepped - 0.1 * 0.01 * stepped, rel=1e-12)


def test_defaults_are_those_of_old() -> None:
    optimizer = AdamW([torch.zeros(1, requires_grad=True)], no_deprecation_warning=True)
    group = optimizer.param_groups[0]
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0, "correct_bias": True}
    assert {name: group[name] for name in defaults} == defaults


def test_closure_and_mistakes() -> None:
    weight = torch.ones(1, requires_grad=True)

    def closure() -> torch.Tensor:
        loss = (weight * 2).sum()
        loss.backward()
        return loss

    assert AdamW([weight]).step(closure).item() == 2
    with pytest.raises(ValueError, match="must not be negative"):
        AdamW([weight], lr=-1)
