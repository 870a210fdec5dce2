"""A decision is declared once: requests, orders and pages list all decisions."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from moaic.compile.backend import moai
from moaic.option import enable_advanced_parallelization
from moaic.passes.config import DECISIONS, FROM_SIMPLE, KEPT, LOGGED, Config, Request
from moaic.planner.request import parse_request

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("names", [FROM_SIMPLE, KEPT, LOGGED, tuple(field.name for field in fields(Request))])
def test_every_decision_has_its_place_in_every_order(names: tuple[str, ...]) -> None:
    assert sorted(names) == sorted(DECISIONS)


def test_a_request_leaves_everything_open() -> None:
    assert all(getattr(Request(), name) is None for name in DECISIONS)


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_read_as_it_is_written(name: str) -> None:
    default = getattr(Config(), name)
    for value in (default, 2 if type(default) is int else default):
        assert getattr(parse_request(f"{name}={str(value).lower()}"), name) == value
    assert getattr(parse_request(f"{name}=auto"), name) is None


@pytest.mark.parametrize("name", DECISIONS)
def test_a_decision_is_explained(name: str) -> None:
    """In the table of the page, and by name wherever options are listed."""
    row = f"| `{name}` | {DECISIONS[name].values} | {DECISIONS[name].decides} |"
    assert row in (DOCS / "plans.md").read_text(encoding="utf-8").splitlines()
    assert f"`{name}`" in (DOCS / "cuda.md").read_text(encoding="utf-8")
    for function in (moai, enable_advanced_parallelization):
        assert function.__doc__ is not None
        assert name in function.__doc__
