"""Eager reductions of sharded tensors: each worker reduces its shard, then the partial results are combined.

Each distinct shard counts once, even if it has replicas. Partial results are combined in order of rank, so all workers
get the same bits. One all-gather serves all tensors of a list.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from moaic.runtime.comm.transport import Group, SubAxis
from moaic.runtime.comm.worker_context import WorkerContext
from moaic.runtime.dtypes import DTYPES
from moaic.runtime.protocol.combination import Combination

linalg: Final[Any] = torch.linalg


class Combiner:
    """One worker's side of a combination."""

    def __init__(self, plan: Combination, context: WorkerContext) -> None:
        group = next((ranks for ranks in plan.groups if context.rank in ranks), None)
        self._group = None if group is None else Group.of(group, context.rank)
        self._transport, self._device = context.transport, context.device
        self._owned = [context.rank in owners for owners in plan.owners]
        self._shapes = plan.shapes
        self._counts = [prod(shape) for shape in plan.shapes]
        self._dtypes = [DTYPES[name] for name in plan.dtypes]
        self._wide = _wide(self._dtypes)
        self._neutral = _neutral(plan.by, self._wide)
        self._combine = _combine(plan, group or ())

    @property
    def takes_part(self) -> bool:
        return self._group is not None

    @property
    def together(self) -> tuple[int, ...]:
        """The ranks that combine their partial results; none if this rank's own is the result."""
        return () if self._group is None or self._group.size == 1 else self._group.ranks

    def run(self, partial: Sequence[Tensor]) -> list[Tensor]:
        """The combined results; `partial` contains the partial results that this rank owns."""
        assert self._group is not None
        own = torch.full((1, sum(self._counts)), self._neutral, dtype=self._wide, device=self._device)
        rest = iter(partial)
        for piece, is_owned in zip(_pieces(own[0], self._counts), self._owned, strict=True):
            if is_owned:
                piece.copy_(next(rest).reshape(-1))
        rows = own if self._group.size == 1 else self._transport.all_gather(own, self._group, SubAxis(0, 1))
        pieces = _pieces(self._combine(rows), self._counts)
        triples = zip(pieces, self._shapes, self._dtypes, strict=True)
        return [piece.view(shape).to(dtype) for piece, shape, dtype in triples]


def _pieces(tensor: Any, counts: Sequence[int]) -> Sequence[Tensor]:
    return tensor.split(counts)


def _wide(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """An element type that holds all of these, and sums of them."""
    if torch.float64 in dtypes:
        return torch.float64
    if any(dtype.is_floating_point for dtype in dtypes):
        return torch.float32
    return torch.int64


def _neutral(by: str, dtype: torch.dtype) -> float:
    """The neutral element of a reduction, which ranks without a partial result contribute."""
    if by not in ("amax", "amin"):
        return 0
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if not dtype.is_floating_point:
        return limits.min if by == "amax" else limits.max
    return float("-inf") if by == "amax" else float("inf")


def _combine(plan: Combination, group: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """The function that combines partial results, one row per rank of the group."""
    parts = len(set(plan.owners[0]) & set(group))

    def mean(rows: Tensor) -> Tensor:
        return rows.sum(0) / parts

    def norm(rows: Tensor) -> Tensor:
        return linalg.vector_norm(rows, plan.order, 0)

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda rows: rows.sum(0),
        "amax": lambda rows: rows.amax(0),
        "amin": lambda rows: rows.amin(0),
        "mean": mean,
        "norm": norm,
    }
    return functions[plan.by]
