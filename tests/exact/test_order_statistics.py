"""Comparisons of values with an order statistic of their batch: exact under every split of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moaic.capture.trace_only import take_call
from moaic.check.proof import Proof, ProofOutcome, step_of
from moaic.passes.config import Config
from moaic.planner.request import parse_request

Statistic = Callable[[Tensor], Tensor]

_norm: Callable[..., Tensor] = torch.linalg.vector_norm  # pyright: ignore[reportUnknownVariableType]

ROWS, WIDTH = 8, 24


def _scattered(h: Tensor) -> Tensor:
    groups = (torch.arange(len(h)) % 2).unsqueeze(1).expand(-1, h.shape[1])
    return h.new_zeros(2, h.shape[1]).scatter_reduce(0, groups, h, "amax").sum()


def _backwards(h: Tensor) -> Tensor:
    return torch.arange(len(h) - 1, -1, -1)


STATISTICS: dict[str, Statistic] = {
    "max": lambda h: h.max(),
    "min": lambda h: h.min(),
    "median": lambda h: h.median(),
    "infinity": lambda h: _norm(h, ord=float("inf")),
    "amax": lambda h: h.amax(0).square().sum(),
    "aminmax": lambda h: torch.aminmax(h, dim=0).max.square().sum() + torch.aminmax(h).min,
    "max of columns": lambda h: h.max(0).values.square().sum(),
    "min of columns": lambda h: h.min(0).values.square().sum(),
    "median of columns": lambda h: h.median(0).values.square().sum(),
    "kth of columns": lambda h: (h * (h >= h.kthvalue(2, 0).values)).sum() + h.kthvalue(3, 0).values.sum(),
    "scattered": _scattered,
    "mask": lambda h: (h * (h >= h.amax(0))).sum() + (h * (h > h.mean(0))).sum(),
    "topk": lambda h: h.topk(3, 0).values.square().sum() + (h * (h <= h.topk(3, 0).values[-1])).sum(),
    "sort": lambda h: (h.sort(0).values * torch.arange(len(h)).unsqueeze(1)).sum(),
    "roll": lambda h: (h * h.roll(1, 0)).sum() + (h * h.flip(0)).sum(),
    "select": lambda h: (h * h.index_select(0, _backwards(h))).sum(),
    "gather": lambda h: (h * h.gather(0, _backwards(h).unsqueeze(1).expand_as(h))).sum(),
    "add": lambda h: torch.zeros_like(h).index_add(0, _backwards(h) // 2, h).square().sum(),
    "one by a count": lambda h: h.square().sum() * (1 / (torch.arange(len(h)) > 2).sum()),
}

PLANS = ("micro_batches=2", "micro_batches=4", "dp=2,micro_batches=2")


class Branched(nn.Module):
    """A statistic of a cheap branch beside a body that takes most of the time."""

    def __init__(self, statistic: Statistic) -> None:
        super().__init__()
        self.cheap = nn.Linear(WIDTH, 4)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.statistic = statistic

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).square().mean() + self.statistic(self.cheap(x))


def config_of(text: str) -> Config:
    asked = parse_request(text)
    return Config(dp=asked.dp or 1, micro_batches=asked.micro_batches or 1)


@pytest.mark.parametrize("name", STATISTICS)
def test_what_is_compared_with_its_own_order_statistic_is_made_once(name: str) -> None:
    """Where rounding depends on shapes, what is made again in another shape equals nothing any longer."""
    torch.compiler.reset()
    torch.manual_seed(0)
    proof = Proof(step_of(take_call(Branched(STATISTICS[name]), {"x": torch.randn(ROWS, WIDTH)})))
    for plan in PLANS:
        verdict = proof.verdict(config_of(plan))
        assert verdict.outcome is ProofOutcome.PASS, (plan, verdict)
