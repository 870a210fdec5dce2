"""Programs byte for byte, and their results, which a refactoring must not change. `update.py` accepts a change."""

from __future__ import annotations

import re
from itertools import zip_longest
from pathlib import Path

import pytest

from moaic.ir.printer import render
from moaic.ir.verify import load
from tests.golden.programs import ALONE, GOLDEN, PAIRS, Row, kept, row_of, text_file, text_of, versions

# Raised by PyTorch's own modules and by the models when they are imported or used.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]

EXACT = 1e-12
"""Relative distance that losses and gradients may have: machines sum in another order."""

UPDATE = "`python -m tests.golden.update` takes it in; with a folder's name, before the change and after, it shows all"

MADE_WITH, ROWS = kept()

captures = pytest.mark.skipif(
    versions() != MADE_WITH, reason=f"programs are kept for {MADE_WITH}, here is {versions()}"
)


@captures
@pytest.mark.parametrize(("model", "plan"), PAIRS)
def test_a_program_is_the_one_that_is_kept(model: str, plan: str, tmp_path: Path) -> None:
    row, text = row_of(model, plan), text_of(model, plan)
    wanted = ROWS[model, plan]
    if row.digest != wanted.digest:
        made = tmp_path / f"{model},{plan}.moai"
        made.write_text(text, encoding="utf-8")
        pytest.fail(f"{_difference(row, wanted, text)}\nthe text is in {made}\n{UPDATE}", pytrace=False)
    assert row.ops == wanted.ops
    assert row.loss == pytest.approx(wanted.loss, rel=EXACT, abs=0), UPDATE
    assert row.gradients == pytest.approx(wanted.gradients, rel=EXACT, abs=0), UPDATE


def _difference(row: Row, wanted: Row, text: str) -> str:
    """Where a text first differs from the one that is kept whole; of others, whether they have as many ops."""
    if row.plan == ALONE:
        pairs_of_lines = zip_longest(text_file(row.model).read_text(encoding="utf-8").splitlines(), text.splitlines())
        for number, (old, new) in enumerate(pairs_of_lines, 1):
            if old != new:
                return f"line {number} of {row.model} differs\n  kept {old}\n  made {new}"
    return f"the text of {row.model} under {row.plan} differs: {wanted.ops} ops are kept, {row.ops} were made"


def test_the_table_holds_the_programs_that_are_made() -> None:
    assert list(ROWS) == list(PAIRS)


def test_plans_of_a_model_compute_the_same() -> None:
    for (model, plan), row in ROWS.items():
        alone = ROWS[model, ALONE]
        assert row.loss == pytest.approx(alone.loss, rel=EXACT, abs=0), plan
        assert row.gradients == pytest.approx(alone.gradients, rel=EXACT, abs=0), plan


@pytest.mark.parametrize("model", GOLDEN)
def test_a_kept_text_is_read_and_written_as_it_is(model: str) -> None:
    """And names no file: what is kept must not change when code moves."""
    text = text_file(model).read_text(encoding="utf-8")
    assert render(load(text)) == text
    assert set(re.findall(r' at "([^"]*)":', text)) == {"source"}
    assert ".py" not in text
