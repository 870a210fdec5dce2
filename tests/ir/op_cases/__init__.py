"""Drawn instances of every op, on which its rule is proved: a file for each family, as in `ir/ops`."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from tests.ir.op_cases import (
    attention,
    convolution,
    copies,
    creation,
    elementwise,
    experts,
    indexing,
    instructions,
    linear_algebra,
    matmul,
    normalization,
    pooling,
    random,
    recurrent,
    reductions,
    value_checks,
    views,
)
from tests.ir.op_cases.drawing import Case, Cases, Drawn, Make

__all__ = ["CASES", "Case", "drawn"]


def joined(*families: Cases) -> dict[str, Make]:
    """Makers by name; AssertionError where an op has two."""
    table: dict[str, Make] = {}
    for name, make in (one for family in families for one in family.items()):
        assert name not in table, name
        table[name] = make
    return table


CASES: Mapping[str, Make] = joined(
    elementwise.cases,
    creation.cases,
    views.cases,
    copies.cases,
    reductions.cases,
    linear_algebra.cases,
    normalization.cases,
    indexing.cases,
    convolution.cases,
    pooling.cases,
    matmul.cases,
    attention.cases,
    experts.cases,
    random.cases,
    recurrent.cases,
    value_checks.cases,
    instructions.cases,
)


def drawn(name: str) -> SearchStrategy[Case]:
    """Cases of the op called `name`."""

    @st.composite
    def make(draw: DrawFn) -> Case:
        return CASES[name](Drawn(draw), name)

    return make()
