"""The committed parameter guide is moaic's output: one row of it is predicted again."""

from __future__ import annotations

from dataclasses import replace

import parameters
import pytest

from moaic.planner.worker import InProcessPool
from moaic.predict.guide import answers, row
from tests.docs.blocks import ROOT


def committed(family: str) -> str:
    return (ROOT / "docs" / "parameters" / f"{family}.md").read_text(encoding="utf-8")


def test_the_guide_says_what_is_predicted() -> None:
    setup = replace(parameters.SMALL, batches=(8,), workers=(1,))
    question = parameters.question("llama2", "small", setup)
    (answer,) = answers(question, InProcessPool())
    assert row(answer, question) in committed("llama2").splitlines()


@pytest.mark.parametrize("family", parameters.TITLES)
def test_every_size_has_its_table(family: str) -> None:
    page = committed(family)
    for size in parameters.sizes(family):
        assert f"\n## {size} on " in page
    assert "\n| Small." in page
    assert "\n| Medium." in page
