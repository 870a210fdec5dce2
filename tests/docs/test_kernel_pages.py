"""The committed tables of kernels equal generated ones."""

from __future__ import annotations

import kernel_pages
import pytest

from moaic.capture.trace_only import Sample

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
"""Inductor imports what warns of itself."""


@pytest.mark.exact
@pytest.mark.parametrize("sample", kernel_pages.SAMPLES, ids=lambda sample: str(sample.sequence))
def test_the_table_says_what_is_made(sample: Sample) -> None:
    assert kernel_pages.section(sample) in kernel_pages.PAGE.read_text(encoding="utf-8")


def test_a_step_is_what_its_functions_run() -> None:
    rows = [
        kernel_pages.Beside("layer", 3, (2, 4), (10.0, 10.0), (0.0, 10.0)),
        kernel_pages.Beside("head", 1, (1, 1), (0.0, 0.0), (30.0, 20.0)),
    ]
    *_, last = kernel_pages.table(rows)
    assert last == "| the step | 1 | 7 | 13 | 60 B | 80 B | 0.75 | 1.00 | 0.60 |"
