"""How the results of an eager reduction on parts become its results."""

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
"""How the results of parts are put together, by op."""

WIDENED: Final = frozenset({"sum", "mean", "norm"})
"""Reductions that round: 16-bit parts are reduced in float32 and rounded once."""


@dataclass(frozen=True, slots=True)
class Combination:
    """How results of parts become results."""

    by: str
    """sum, mean (of parts of equal size), norm, amax or amin."""
    order: float
    """Of a norm."""
    groups: tuple[tuple[int, ...], ...]
    """Ranks that put their parts together."""
    owners: tuple[tuple[int, ...], ...]
    """Per result the ranks whose part counts; the others hold copies, or nothing."""
    shapes: tuple[tuple[int, ...], ...]
    """Per result its shape on one rank."""
    dtypes: tuple[str, ...]
    """Per result its element type in the end."""

    def encoded(self) -> list[Any]:
        return [self.by, self.order, self.groups, self.owners, self.shapes, self.dtypes]

    @staticmethod
    def decoded(data: Any) -> Combination:
        by, order, groups, owners, shapes, dtypes = data
        return Combination(
            by, order, tuple(map(tuple, groups)), tuple(map(tuple, owners)), tuple(map(tuple, shapes)), tuple(dtypes)
        )
