"""The constants of GPUs, fitted to published rows: to all of them, or to those of all sources but one.

A prediction depends on the constants in `published_pricing.CONSTANTS` by the shares of its time that they decide, so
that a fit prices no plan again. Where rows say little, constants are near `EXPECTED`, which no row has changed.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final

import torch
from published_pricing import CONSTANTS, Finding
from published_rows import path_of
from torch import Tensor

KINDS: Final[Mapping[str, str]] = {
    "a100-40": "a100-80",
    "h100-96": "h100",
    "h200": "h100",
    "mi210": "mi250",
    "mi250x": "mi250",
}
"""By cluster, the one with whose rows its constants are fitted, if not with its own."""

EXPECTED: Final[Mapping[str, float]] = {"matmul": 0.65, "attention": 0.4, "bandwidth": 0.85, "contention": 0.25}
"""Shares of its peaks that any GPU is expected to reach, and what a second of a collective costs kernels beside it."""

DOUBT: Final = 0.2
"""Standard deviation of the logarithms of constants around these."""

NOISE: Final = 0.05
"""Standard deviation of the logarithms of published figures; what is further off counts linearly."""

ROUNDS: Final = 30

FEWEST: Final = 5
"""Rows of other sources on a kind of GPU without which none is left out."""

Costs = Mapping[str, float]
"""By constant, what it costs relative to the cluster's own."""


def kind_of(gpu: str) -> str:
    return KINDS.get(gpu, gpu)


def left_out(findings: Sequence[Finding]) -> list[tuple[Finding, float]]:
    """The errors of each source with the constants that the others give."""
    found: list[tuple[Finding, float]] = []
    for source in sorted({each.source for each in findings}):
        of_source = _by_kind([each for each in findings if each.source == source])
        others = _by_kind([each for each in findings if each.source != source])
        for kind, group in of_source.items():
            if len(others.get(kind, [])) < FEWEST:
                continue
            costs = _fitted(others[kind], kind)
            found += [(each, (1 + each.error) / _slowed(each, costs) - 1) for each in group]
    return found


def constants(findings: Sequence[Finding]) -> Iterator[str]:
    """The constants that all rows of a kind of GPU give, beside those of its cluster."""
    yield "| constants fitted to all rows | " + " | ".join(CONSTANTS) + " |"
    yield "| --- | " + " | ".join("---:" for _ in CONSTANTS) + " |"
    for kind, group in sorted(_by_kind(findings).items()):
        costs, own = _fitted(group, kind), _own(kind)
        figures = [f"{_scaled(name, own[name], costs[name]):.3f} (now {own[name]})" for name in CONSTANTS]
        yield f"| {kind} | {' | '.join(figures)} |"
    yield ""


def _by_kind(findings: Sequence[Finding]) -> Mapping[str, list[Finding]]:
    found: dict[str, list[Finding]] = defaultdict(list)
    for each in findings:
        found[kind_of(each.gpu)].append(each)
    return found


def _slowed(found: Finding, costs: Costs) -> float:
    """The time of a step relative to that with the cluster's own constants."""
    return 1 + sum(share * (costs[name] - 1) for name, share in found.shares.items())


def _fitted(findings: Sequence[Finding], kind: str) -> Costs:
    """The costs that fit these rows best: least squares of logarithms, in which rows that are far off weigh less."""
    own = _own(kind)
    expected = torch.tensor([_cost(name, own[name]) for name in CONSTANTS], dtype=torch.float64).log()
    errors = torch.tensor([1 + each.error for each in findings], dtype=torch.float64).log()
    shares = torch.tensor([[each.shares[name] for name in CONSTANTS] for each in findings], dtype=torch.float64)
    costs = expected
    for _ in range(ROUNDS):
        costs = costs + _improvement(costs, expected, shares, errors)
    return {name: float(cost) for name, cost in zip(CONSTANTS, costs.exp(), strict=True)}


def _improvement(costs: Tensor, expected: Tensor, shares: Tensor, errors: Tensor) -> Tensor:
    """One step of Gauss and Newton towards the least squares, with the weights of Huber."""
    slowed = 1 + shares @ (costs.exp() - 1)
    left = errors - slowed.log()
    slopes = -shares * costs.exp() / slowed[:, None]
    weights = (NOISE / left.abs()).clamp(max=1) / NOISE**2
    normal = slopes.T @ (weights[:, None] * slopes) + torch.eye(len(costs), dtype=costs.dtype) / DOUBT**2
    return -torch.inverse(normal) @ (slopes.T @ (weights * left) + (costs - expected) / DOUBT**2)


def _cost(name: str, own: float) -> float:
    """What the expected constant costs relative to a cluster's own."""
    return EXPECTED[name] / own if name == "contention" else own / EXPECTED[name]


def _scaled(name: str, own: float, cost: float) -> float:
    return own * cost if name == "contention" else own / cost


@cache
def _own(gpu: str) -> Mapping[str, float]:
    """The constants of a cluster."""
    (device,) = tomllib.loads(path_of(gpu).read_text(encoding="utf-8"))["device"]
    return {**{name: share for name, (share, _) in device["efficiency"].items()}, "contention": device["contention"]}
