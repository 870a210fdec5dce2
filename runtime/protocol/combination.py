"""Combination of the partial results of an eager reduction on sharded operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

REDUCTIONS: Final[Mapping[str, str]] = {
    "aten.sum": "sum",
    "aten.sum.dim_IntList": "sum",
    "aten.count_nonzero": "sum",
    "aten.count_nonzero.dim_IntList": "sum",
    "aten.mean": "mean",
    "aten.mean.dim": "mean",
    "aten.linalg_vector_norm": "norm",
    "aten._foreach_norm.Scalar": "norm",
    "aten.amax": "amax",
    "aten.max": "amax",
    "aten._foreach_max": "amax",
    "aten.amin": "amin",
    "aten.min": "amin",
    "aten.any": "amax",
    "aten.any.dim": "amax",
    "aten.any.dims": "amax",
    "aten.all": "amin",
    "aten.all.dim": "amin",
    "aten.all.dims": "amin",
}
"""The operation that combines partial results, by op."""

WIDENED: Final = frozenset({"sum", "mean", "norm"})
"""Reductions that round: with 16-bit operands they compute in float32 and round once."""


UnpaddedDim = tuple[int, tuple[int, ...]]
"""A dim of uneven shards, and by rank how much of it is no padding."""


@dataclass(frozen=True, slots=True)
class Combination:
    """The combination of the workers' partial results into results."""

    by: str
    """sum, mean (of parts of equal size), norm, amax or amin."""
    order: float
    """The order of a norm."""
    groups: tuple[tuple[int, ...], ...]
    """Groups of ranks that combine their partial results."""
    owners: tuple[tuple[int, ...], ...]
    """Per result, the ranks whose partial result counts; others hold replicas or nothing."""
    shapes: tuple[tuple[int, ...], ...]
    """Per result, its local shape."""
    dtypes: tuple[str, ...]
    """Per result, its final element type."""
    unpadded: tuple[tuple[UnpaddedDim, ...], ...]
    """Per operand, its uneven dims that are reduced."""

    def encoded(self) -> list[Any]:
        return [self.by, self.order, self.groups, self.owners, self.shapes, self.dtypes, self.unpadded]

    @staticmethod
    def decoded(data: Any) -> Combination:
        by, order, groups, owners, shapes, dtypes, unpadded = data
        return Combination(
            by,
            order,
            tuple(map(tuple, groups)),
            tuple(map(tuple, owners)),
            tuple(map(tuple, shapes)),
            tuple(dtypes),
            tuple(tuple((dim, tuple(sizes)) for dim, sizes in dims) for dims in unpadded),
        )
